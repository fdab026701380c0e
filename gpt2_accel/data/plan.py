"""What a preparation is to make of which text, and where."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from gpt2_accel.data.documents import Piece
from gpt2_accel.data.shards import token_dtype
from gpt2_accel.tokenizer import END_OF_TEXT, fingerprint

SHARD_TOKENS = 100_000_000


@dataclass
class Plan:
    """What is to become of which text. `pieces` are the corpus; `splits` those that must not be without text.

    `source`, `revision` and `command` say in the manifest where the text came from. Shards hold
    `shard_tokens` each, the last of a split fewer; with `validation_shard` the first shard is for
    validation and all others are for training. Work on a plan that is not `restartable` begins afresh.
    """

    pieces: Sequence[Piece]
    tokenizer: PreTrainedTokenizerBase
    data_dir: Path
    source: str
    revision: str | None = None
    command: str | None = None
    shard_tokens: int = SHARD_TOKENS
    validation_shard: bool = False
    splits: tuple[str, ...] = ("train", "val")
    restartable: bool = True

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise ValueError(f"shard_tokens must be above 0, got {self.shard_tokens}")

    @property
    def work(self) -> Path:
        """Where the pieces' files are made, and then the shards."""
        return self.data_dir.with_name(f".{self.data_dir.name}.partial")

    @property
    def separator(self) -> int | None:
        return self.tokenizer.convert_tokens_to_ids(END_OF_TEXT)

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(len(self.tokenizer))

    @functools.cached_property
    def mark(self) -> str | None:
        """SHA-256 (hex) of all that the result depends on, None if that cannot be told."""
        if not self.restartable:
            return None
        content = [*map(repr, self.pieces), fingerprint(self.tokenizer)]
        return digest(*content, str(self.shard_tokens), str(self.validation_shard))

    def piece_marks(self) -> list[str]:
        """For each piece the SHA-256 (hex) of all that its tokens depend on."""
        tokenizer = fingerprint(self.tokenizer)
        return [digest(repr(piece), tokenizer) for piece in self.pieces]


def digest(*content: str) -> str:
    """SHA-256 (hex) of lines of text."""
    return hashlib.sha256("\n".join(content).encode("utf-8", "replace")).hexdigest()
