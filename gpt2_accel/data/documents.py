"""Documents, where a text may be cut, and which documents are held out for validation."""

import gzip
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from gpt2_accel.runtime.files import first_line

HELD_OUT = 20  # one document in 20 is for validation, if a corpus is not very large
VAL_SHARE = 0.05  # the validation split's share of a corpus
FEWEST = 0.01  # bounds of that share if whole documents are held out
MOST = 0.15
CHUNK = 2**20  # characters that are tokenized at once
UNDIVIDED = 1000  # characters up to which a row is divided at the end of a word only
WORD_END = r"\w(?=[ \n])"
LAST_WORD_END = re.compile(r"(?s).*\w(?=[ \n])")


class Document(NamedTuple):
    """A document of the split `split`, in chunks of text that are tokenized separately.

    `place` names the document in messages.
    """

    split: str
    chunks: Iterable[str]
    place: str = "a document"


# Held-out documents


def text_digest(key: str) -> str:
    """Returns the SHA-256 (hex) of a text."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def fitting_share(held: float, total: float) -> bool:
    """Whether `held` of a `total` amount is enough for validation, and not too much."""
    return FEWEST <= held / (total or 1) <= MOST


def split_of(key: str, one_in: int = HELD_OUT) -> str:
    """Returns the split of the document with the name or text `key`: one in `one_in` is held out.

    Equal rows share a split, by SHA-256. A document keeps it when others are added or removed.
    """
    return "train" if int(text_digest(key), 16) % one_in else "val"


def enough_held_out(sizes: Iterable[tuple[str, int]]) -> bool:
    """Whether documents, given by split and size, have a `fitting_share` for validation."""
    total: Counter[str] = Counter()
    for split, size in sizes:
        total[split] += size
    return fitting_share(total["val"], total.total())


def last_part(text: str) -> int:
    """Returns where the last `VAL_SHARE` of a text begins, at the end of a word.

    A short text without one is not divided.
    """
    cut = int(len(text) * (1 - VAL_SHARE))
    match = re.search(WORD_END, text[cut:])
    if match:
        return cut + match.end()
    return cut if len(text) >= UNDIVIDED else len(text)


# Reading and cutting a text


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turns a library's error while reading `source` into one sentence, a `ValueError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text ({error}): convert it to UTF-8") from error
    except Exception as error:
        raise ValueError(
            f"{source} cannot be read ({first_line(error)}): if it is damaged or of another "
            "format, replace it or leave it out; if the network failed, start again, finished "
            "work is kept"
        ) from error


def open_text(path: Path) -> gzip.GzipFile | BufferedReader:
    """Opens a file of text for reading bytes, and decompresses `.gz`."""
    return gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")


def text_size(path: Path) -> int:
    """Returns the bytes of a file of text, decompressed. Raises `ValueError` if it is damaged."""
    with reading(str(path)), open_text(path) as file:
        return file.seek(0, os.SEEK_END)


def separator_pattern(separators: Iterable[str]) -> re.Pattern:
    """Returns a pattern of a line, with its end, that is one of the texts; nothing else matches."""
    lines = "|".join(map(re.escape, separators)) or "(?!)"
    return re.compile(rf"^((?:{lines})\r?$\n?)", re.MULTILINE)


def separated(parts: Iterable[str], separator: re.Pattern) -> Iterator[Iterator[str]]:
    """Yields the documents between separators, each as an iterator over pieces of its text.

    A part ends at the end of a line, or is a piece of a line of more than `CHUNK` characters.
    """
    pieces = filter(None, chain.from_iterable(map(separator.split, parts)))
    for apart, own in groupby(pieces, lambda piece: bool(separator.fullmatch(piece))):
        if not apart:
            yield own


def chunks(parts: Iterable[str]) -> Iterator[str]:
    """Joins `parts` and yields the text in chunks of about `CHUNK` characters, none if it is empty.

    A chunk ends at a letter or digit before a space or a newline. GPT-2's pre-tokenizer always
    splits there, so the tokens equal the tokens of the undivided text. A text without such a place
    is cut elsewhere.
    """
    held = ""
    for part in parts:
        for start in range(0, len(part), CHUNK):
            held += part[start : start + CHUNK]
            if len(held) >= CHUNK:
                match = LAST_WORD_END.match(held)
                cut = match.end() if match else len(held)
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held


def next_cut(path: Path, offset: int, separator: re.Pattern) -> int:
    """Returns the byte offset after the first separator in a file, from `offset` on.

    It looks at one megabyte. If it has no separator, or less than `FEWEST` of the file follows it,
    this is the first end of a word; without one the next character.
    """
    size = text_size(path)
    with open_text(path) as file:
        file.seek(offset)
        text = file.read(CHUNK).decode("utf-8", "surrogateescape")
    match = separator.search(text, 1)  # 0 may be within a line
    if not match or size - offset - match.end() < FEWEST * size:
        match = re.search(WORD_END, text) or re.match("[\udc80-\udcff]*", text)
    assert match is not None  # the second matches any text
    return offset + len(text[: match.end()].encode("utf-8", "surrogateescape"))
