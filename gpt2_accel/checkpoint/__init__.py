"""Checkpoints: writing, finding, verifying and loading them."""
