"""The plan of a preparation: the corpus, the tokenizer, the output folder and the shards."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.data.documents import Piece
from gpt2_accel.data.shards import token_dtype
from gpt2_accel.tokenizer import END_OF_TEXT, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_TOKENS = 100_000_000


@dataclass
class Plan:
    """What a preparation makes from which corpus.

    `pieces` are the corpus. `splits` are the splits that must not be empty. `source`, `revision` and `command` are
    recorded in the manifest. A shard holds `shard_tokens` tokens, the last shard of a split may hold fewer. With
    `validation_shard` the first shard is for validation and all others are for training. A plan that is not
    `restartable` is not resumed after a kill.

    Raises `ValueError` if `shard_tokens` is below 1.
    """

    pieces: Sequence[Piece]
    tokenizer: "PreTrainedTokenizerBase"
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
        """The folder in which the pieces' files and the shards are written."""
        return work_folder(self.data_dir)

    @property
    def separator(self) -> int | None:
        return self.tokenizer.convert_tokens_to_ids(END_OF_TEXT)

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(len(self.tokenizer))

    @functools.cached_property
    def hash(self) -> str | None:
        """SHA-256 (hex) of everything that the result depends on, None if the plan is not restartable."""
        if not self.restartable:
            return None
        content = [*map(repr, self.pieces), fingerprint(self.tokenizer)]
        return digest(*content, str(self.shard_tokens), str(self.validation_shard))

    def piece_hashes(self) -> list[str]:
        """Returns for each piece the SHA-256 (hex) of everything that its tokens depend on."""
        tokenizer = fingerprint(self.tokenizer)
        return [digest(repr(piece), tokenizer) for piece in self.pieces]


def work_folder(data_dir: Path) -> Path:
    """Returns the folder in which a preparation of `data_dir` works."""
    return data_dir.with_name(f".{data_dir.name}.partial")


def digest(*content: str) -> str:
    """Returns the SHA-256 (hex) of lines of text."""
    return hashlib.sha256("\n".join(content).encode("utf-8", "replace")).hexdigest()
