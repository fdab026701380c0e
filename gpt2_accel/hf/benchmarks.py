"""The Hub data sets of the benchmarks."""

from typing import NamedTuple


class Source(NamedTuple):
    """A split of a data set on the Hub."""

    repo_id: str
    config: str
    split: str

    @property
    def file(self) -> str:
        """The Hub's Parquet file of the split, which fits into one file."""
        return f"{self.config}/{self.split}/0000.parquet"


SOURCES = {"hellaswag": Source("Rowan/hellaswag", "default", "validation")}
