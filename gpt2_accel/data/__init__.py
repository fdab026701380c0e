"""Data: preparation, shards, sources, and the loaders of a run."""

from gpt2_accel.data.source import Data

__all__ = ["Data"]
