"""What a corpus is made of, which of it is held out for validation, and where a text may be cut.

A corpus is a list of pieces, in order. A piece is what one worker reads by itself: a part of a large file
or several small ones, some `PIECE_BYTES` of text. How a corpus falls into pieces depends on the corpus
alone, not on who reads it.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

VAL_SHARE = 0.05  # of a corpus for validation
PIECE_BYTES = 128 * 2**20
CHUNK = 2**20  # characters that are tokenized at once
LONGEST_WORD = 2**20  # characters without a place to cut before one is made

HeldOut = Callable[[str], bool]
"""Whether the document of that name is for validation."""


class Document(NamedTuple):
    """A text as chunks, to be tokenized one by one; `begins` is False where it goes on from the piece
    before, `place` says where it is. A byte that is not UTF-8 stands there as a lone surrogate, as
    `surrogateescape` has it."""

    split: str
    chunks: Iterable[str]
    begins: bool = True
    place: str = "a document"


class Piece(Protocol):
    """Part of a corpus. `size` estimates its text in bytes."""

    size: int

    def documents(self) -> Iterator[Document]: ...


def held_out(key: str, one_in: int = 20) -> bool:
    """Whether the document named `key` is for validation: one in `one_in`, by SHA-256 of its name.

    So a document stays on its side when others are added or removed.
    """
    return int(hashlib.sha256(key.encode("utf-8", "replace")).hexdigest(), 16) % one_in == 0


# What holds documents out. Their `repr` says all that the choice depends on: it marks begun work.


@dataclass(frozen=True)
class ByHash:
    """Holds out one in 20 documents, by their names."""

    def __call__(self, name: str) -> bool:
        return held_out(name)


@dataclass(frozen=True)
class LastPart:
    """Holds out no document, but the last `VAL_SHARE` of each (`split_document`)."""

    def __call__(self, name: str) -> bool:
        return False


@dataclass(frozen=True)
class Drawn:
    """Holds out a share of `count` rows, named by their numbers: those that `datasets`' `train_test_split`
    draws with `seed`."""

    count: int
    share: float
    seed: int

    def __call__(self, name: str) -> bool:
        return int(name) in drawn_rows(self.count, self.share, self.seed)


@functools.cache
def drawn_rows(count: int, share: float, seed: int) -> frozenset[int]:
    """The rows that `Drawn` holds out."""
    order = np.random.default_rng(seed).permutation(count)
    return frozenset(order[: int(np.ceil(share * count))].tolist())


def split_of(is_held_out: bool) -> str:
    """The split that a document goes to."""
    return "val" if is_held_out else "train"


# Cutting a text


def split_document(text: str, name: str, is_held_out: HeldOut, place: str) -> Iterator[Document]:
    """The document of that name, in its split; two of them where the last part of each is held out."""
    cut = len(text)
    if isinstance(is_held_out, LastPart):
        cut = int(cut * (1 - VAL_SHARE))
        match = re.search(r"\w(?=[ \n])", text[cut:])
        cut = cut + match.end() if match else len(text)
    yield Document(split_of(is_held_out(name)), chunks([text[:cut]]), place=place)
    if text[cut:]:
        yield Document("val", chunks([text[cut:]]), place=place)


def chunks(parts: Iterable[str]) -> Iterator[str]:
    """The text that `parts` make up, in chunks of about `CHUNK` characters.

    Cut where a letter or digit is followed by a space or a line's end: GPT-2's word splitting always cuts
    there, so the tokens are those of the whole text. Only a text that has no such place in
    `LONGEST_WORD` characters is cut elsewhere.
    """
    held = ""
    for part in parts:
        for start in range(0, len(part), CHUNK):
            held += part[start : start + CHUNK]
            if len(held) < CHUNK:
                continue
            cut = last_cut(held)
            if cut is None and len(held) >= LONGEST_WORD:
                cut = len(held)
            if cut is not None:
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held


def last_cut(text: str) -> int | None:
    """The last place at which `text` can be cut; see `chunks`."""
    for start in (max(0, len(text) - 4096), 0):
        ends = [match.end() for match in re.finditer(r"\w(?=[ \n])", text[start:])]
        if ends:
            return start + ends[-1]
    return None


def next_cut(path: Path, offset: int) -> int | None:
    """The first place from byte `offset` on, within a megabyte, at which a file can be cut."""
    with open(path, "rb") as file:
        file.seek(offset)
        match = re.search(rb"[A-Za-z0-9](?=[ \n])", file.read(CHUNK))
    return match and offset + match.end()
