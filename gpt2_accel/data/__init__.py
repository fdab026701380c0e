"""Data: tokenizes text into shards on disk, and loads them in training order."""
