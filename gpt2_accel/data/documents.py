"""Documents and pieces of a corpus, the held-out split, and the places where a text may be cut.

A corpus is an ordered list of pieces. A piece is the unit of work: a part of a large file or several small files,
about `piece_size` bytes of text. The pieces depend only on the corpus, not on the number of workers.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

VAL_SHARE = 0.05  # the validation split's share of a corpus
PIECES = 256  # of a corpus, unless they were smaller or larger than these:
SMALLEST_PIECE, LARGEST_PIECE = 2**20, 2**27  # bytes
CHUNK = 2**20  # characters that are tokenized at once
LONGEST_WORD = 2**20  # characters without a word boundary after which a text is cut anyway

HeldOut = Callable[[str], bool]
"""Whether the document with the given name is held out for validation."""


class Document(NamedTuple):
    """A text in chunks, which are tokenized separately.

    `begins` is False if the text continues a document of the previous piece. `place`, as `str`, names it in messages.
    A byte that is not UTF-8 is a lone surrogate (`surrogateescape`).
    """

    split: str
    chunks: Iterable[str]
    begins: bool = True
    place: object = "a document"


class Piece(Protocol):
    """A part of a corpus. `size` is an estimate of its text in bytes."""

    size: int

    def documents(self) -> Iterator[Document]: ...


def name_digest(key: str) -> str:
    """Returns the SHA-256 (hex) of a document's name."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def held_out(key: str, one_in: int = 20) -> bool:
    """Whether the document named `key` is held out: one in `one_in`, by the SHA-256 of its name.

    A document keeps its split when others are added or removed.
    """
    return int(name_digest(key), 16) % one_in == 0


def piece_size(corpus: int) -> int:
    """Returns the size in bytes of the pieces of a corpus of `corpus` bytes.

    It is a power of two, so that a small correction of the text rarely changes it.
    """
    size = 1 << (corpus // PIECES).bit_length()
    return min(max(size, SMALLEST_PIECE), LARGEST_PIECE)


# The `HeldOut` rules. Their `repr` is part of a plan's hash, so it must hold everything that they depend on.


@dataclass(frozen=True)
class ByHash:
    """Holds out one in 20 documents, by a hash of their names."""

    def __call__(self, name: str) -> bool:
        return held_out(name)


@dataclass(frozen=True)
class LowestHashes:
    """Holds out the documents whose names have a hash up to `limit`, a SHA-256 in hex."""

    limit: str

    def __call__(self, name: str) -> bool:
        return name_digest(name) <= self.limit


@dataclass(frozen=True)
class LastPart:
    """Holds out the last `VAL_SHARE` of each document (`split_document`), and no whole document."""

    def __call__(self, name: str) -> bool:
        return False


@dataclass(frozen=True)
class Drawn:
    """Holds out the rows that `train_test_split` of `datasets` draws with `seed`, a `share` of `count` rows.

    The rows' names are their numbers.
    """

    count: int
    share: float
    seed: int

    def __call__(self, name: str) -> bool:
        return int(name) in drawn_rows(self.count, self.share, self.seed)


@functools.cache
def drawn_rows(count: int, share: float, seed: int) -> frozenset[int]:
    """Returns the numbers of the rows that `Drawn` holds out."""
    order = np.random.default_rng(seed).permutation(count)
    return frozenset(order[: int(np.ceil(share * count))].tolist())


def split_of(is_held_out: bool) -> str:
    """Returns the name of a document's split."""
    return "val" if is_held_out else "train"


# Cutting a text


def split_document(text: str, name: str, is_held_out: HeldOut, place: object) -> Iterator[Document]:
    """Yields the document in its split; with `LastPart`, its first part in `train` and the rest in `val`."""
    cut = len(text)
    if isinstance(is_held_out, LastPart):
        cut = int(cut * (1 - VAL_SHARE))
        match = re.search(r"\w(?=[ \n])", text[cut:])
        cut = cut + match.end() if match else len(text)
    yield Document(split_of(is_held_out(name)), chunks([text[:cut]]), place=place)
    if text[cut:]:
        yield Document("val", chunks([text[cut:]]), place=place)


def chunks(parts: Iterable[str]) -> Iterator[str]:
    """Joins `parts` and yields the text in chunks of about `CHUNK` characters.

    A chunk ends at a letter or digit that is followed by a space or a newline. GPT-2's pre-tokenizer always splits
    there, so the tokens are the same as those of the whole text. A text without such a place in `LONGEST_WORD`
    characters is cut elsewhere.
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
    """Returns the last place at which `text` can be cut (see `chunks`), or None."""
    for start in (max(0, len(text) - 4096), 0):
        ends = [match.end() for match in re.finditer(r"\w(?=[ \n])", text[start:])]
        if ends:
            return start + ends[-1]
    return None


def next_cut(path: Path, offset: int) -> int | None:
    """Returns the first byte offset at which a file can be cut, within a megabyte from `offset`, or None."""
    with open(path, "rb") as file:
        file.seek(offset)
        match = re.search(rb"[A-Za-z0-9](?=[ \n])", file.read(CHUNK))
    return match and offset + match.end()
