"""A split of a data folder as one long array of tokens, read from its shards."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpt2_accel.data.shards import (
    DTYPES,
    OPEN_SHARDS,
    TOKEN_ID,
    Shard,
    UnreadableData,
    read_manifest,
)

Read = Callable[[dict, int, int], np.ndarray]
"""`read(shard, offset, count)` returns the tokens [offset, offset + count) of a shard, (count,) integers. `shard` is its
entry in the manifest. It raises an error, and returns no fewer tokens, if it cannot read them all."""


class TokenStream:
    """One split of a data folder as one long array of tokens, across its shards.

    `data_dir` holds the manifest; `read_shard` reads the shards, by default from the same folder. `tokens` is the length,
    `bytes` the UTF-8 bytes of the text (None if unknown), `vocab_size` the tokenizer's. `sequence_length` is the length of
    the windows of conversations, and `targets`, (windows,) int64, their counted tokens; both are None for text.

    Raises `ValueError` if the split does not exist, and the errors of `disk_reader` or `read_shard`.
    """

    def __init__(self, data_dir: str | Path, split: str, read_shard: Read | None = None):
        manifest = read_manifest(data_dir)
        if split not in manifest["splits"]:
            raise ValueError(
                f"{data_dir} has no split {split!r}, only {', '.join(manifest['splits'])}"
            )
        entry = manifest["splits"][split]
        self.data_dir, self.split = Path(data_dir), split
        self.tokens: int = entry["tokens"]
        self.bytes: int | None = entry["bytes"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.sequence_length: int | None = manifest.get("sequence_length")
        self.shards: list[dict] = entry["shards"]
        self._ends = np.cumsum([shard["tokens"] for shard in self.shards], dtype=np.int64)
        targets = None if self.sequence_length is None else entry["targets"]
        if read_shard is None:
            shards = [*self.shards, targets] if targets else self.shards
            read_shard = disk_reader(self.data_dir, shards, DTYPES[manifest["dtype"]])
        self.read_shard = read_shard
        self.targets: np.ndarray | None = None
        if targets:
            self.targets = read_shard(targets, 0, targets["tokens"]).astype(np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns tokens [start, start + count) as (count,) int64; those of conversations with their bits.

        Raises the errors of `read_shard`, and `ValueError` if a token id is not below `vocab_size`.
        """
        assert 0 <= start and start + count <= self.tokens, (start, count, self.tokens)
        out = np.empty(count, np.int64)
        number = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < count:
            shard, left = self.shards[number], int(self._ends[number]) - start - filled
            size = min(count - filled, left)
            piece = self.read_shard(shard, shard["tokens"] - left, size)
            if len(piece) != size:
                raise UnreadableData(
                    f"{self.data_dir / shard['file']} gave {len(piece):,} of {size:,} tokens: try again"
                )
            ids = piece if self.sequence_length is None else piece & TOKEN_ID
            if size and ids.max() >= self.vocab_size:
                raise ValueError(
                    f"{self.data_dir / shard['file']} holds the token id {ids.max()}, but the vocabulary has "
                    f"{self.vocab_size}: prepare the data again"
                )
            out[filled : filled + size] = piece
            filled += size
            number += 1
        return out


def disk_reader(data_dir: Path, shards: list[dict], dtype: np.dtype) -> Read:
    """Returns a function that reads the shards of a folder; at most `OPEN_SHARDS` are open.

    Each is opened now to check it, and checked whenever it is opened again. Raises the errors of `Shard`.
    """
    listed = {shard["file"]: shard for shard in shards}

    @functools.lru_cache(maxsize=OPEN_SHARDS)
    def opened(file: str) -> Shard:
        return Shard(data_dir, listed[file], dtype)

    for file in listed:
        opened(file)
    return lambda shard, offset, count: opened(shard["file"]).read(offset, count)
