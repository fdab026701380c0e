"""A split of a data folder as one long array of tokens, read from its shards."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from gpt2_accel.data.shards import DTYPES, TOKEN_ID, UnreadableData, read_manifest, read_shard

Read = Callable[[dict, int, int], np.ndarray]
"""`read(shard, offset, count)` returns the tokens [offset, offset + count) of a shard, (count,) integers. `shard` is its
entry in the manifest. It raises an error, and returns no fewer tokens, if it cannot read them all."""


class TokenStream:
    """One split of a data folder as one long array of tokens, across its shards.

    `data_dir` holds the manifest. `read` reads the shards; by default it is `read_shard`, and all are checked now.
    `tokens` is the length, `bytes` the UTF-8 bytes of the text (None if unknown), `vocab_size` the tokenizer's.
    `sequence_length` is the length of the windows of conversations, and `targets`, (windows,) int64, their counted tokens;
    both are None for text.

    Raises `ValueError` if the split does not exist, and the errors of `read`.
    """

    def __init__(self, data_dir: str | Path, split: str, read: Read | None = None):
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
        self._read = read or partial(read_shard, self.data_dir, DTYPES[manifest["dtype"]])
        for shard in self.shards if read is None else []:
            self._read(shard, 0, 0)
        self.targets: np.ndarray | None = None
        if self.sequence_length is not None:
            targets = entry["targets"]
            self.targets = self._read(targets, 0, targets["tokens"]).astype(np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns tokens [start, start + count) as (count,) int64; those of conversations with their bits.

        Raises the errors of the stream's `read`, and `ValueError` if a token id is not below `vocab_size`.
        """
        assert 0 <= start and start + count <= self.tokens, (start, count, self.tokens)
        out = np.empty(count, np.int64)
        number = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < count:
            shard, left = self.shards[number], int(self._ends[number]) - start - filled
            size = min(count - filled, left)
            piece = self._read(shard, shard["tokens"] - left, size)
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
