"""Data: preparation, shards, sources, and the loaders of a run."""

from gpt2_accel.data.source import Data, counted

__all__ = ["Data", "counted"]
