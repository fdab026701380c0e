"""Sources of text: parts of a corpus that worker processes read, and the files of a corpus.

A part of a source becomes one shard of tokens per split. Its size is about `4 * shard_tokens` bytes, less for a corpus of
fewer than `PARTS` such parts, so that several processes share it. Small files are joined in order. The parts depend only
on the source and `shard_tokens`. Plain text is divided by byte ranges: every byte of a text counts. `rows.py` has the
files with one document per row.
"""

import codecs
import hashlib
import http.client
import itertools
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpt2_accel.data.documents import (
    CHUNK,
    VAL_SHARE,
    Document,
    chunks,
    fitting_share,
    held_out,
    next_cut,
    split_of,
)
from gpt2_accel.files import first_line

ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # files with one document per row
PARTS, SMALLEST_PART = 32, 2**20  # of a corpus; bytes
BYTES_PER_TOKEN = 4  # about, of English in GPT-2's BPE
COMPRESSION = {".parquet": 2, ".gz": 3, ".zst": 3}  # about
TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


class Source(Protocol):
    """A part of a corpus that has documents. `size` is an estimate of its text in bytes.

    Its `repr` changes with everything that its documents depend on.
    """

    size: int

    def documents(self) -> Iterator[Document]: ...


@dataclass(frozen=True)
class Joined:
    """Consecutive sources, small ones, that make one shard per split."""

    parts: tuple[Source, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def documents(self) -> Iterator[Document]:
        for part in self.parts:
            yield from part.documents()


def join(parts: Iterable[Source], part_bytes: int) -> list[Source]:
    """Joins consecutive sources of up to `part_bytes` together."""
    groups: list[list[Source]] = []
    room = 0
    for part in parts:
        if part.size > room or not groups:
            groups.append([])
            room = part_bytes
        groups[-1].append(part)
        room -= part.size
    return [Joined(tuple(group)) for group in groups]


def part_size(size: int, shard_tokens: int) -> int:
    """Returns the size in bytes of the parts of a corpus of `size` bytes."""
    return min(max(size // PARTS, SMALLEST_PART), BYTES_PER_TOKEN * shard_tokens)


def text_size(path: str | Path, size: int) -> int:
    """Returns an estimate of the text, in bytes, in a file of `size` bytes."""
    return size * COMPRESSION.get(Path(path).suffix, 1)


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turns a library's error while reading `source` into one sentence, a `ValueError`."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{source} cannot be read ({first_line(error)}): if it is damaged or of another format, replace it or leave it "
            "out; if the network failed, start again, finished work is kept"
        ) from error


def clean(text: str) -> tuple[str, int]:
    """Replaces lone surrogates, which stand for invalid bytes, by U+FFFD; returns the text and their number."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        # A pair of surrogates is one character.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole, whole.count("\ufffd") - text.count("\ufffd")
    return text, 0


# Files


def text_files(
    sources: Sequence[str], pattern: str | None = None
) -> tuple[dict[Path, str], list[str]]:
    """Finds the files of text and rows among files and folders.

    A folder gives its sorted files that match `pattern`, and are not hidden and not in a hidden folder. Returns their paths
    with the names by which documents are held out, and for each folder a line that says what was taken and left out.

    Raises `FileNotFoundError` if a source does not exist or holds no text, `ValueError` for a file that is not text or for
    an absolute pattern.
    """
    files, lines = {}, []
    for source in map(Path, sources):
        if source.is_file():
            if problem := not_text(source):
                raise ValueError(
                    f"{source} is {problem}: convert it to UTF-8 text, or leave it out"
                )
            files[source] = source.name
            continue
        if not source.is_dir():
            raise FileNotFoundError(
                f"{source} does not exist: give a text file or a folder of them"
            )
        groups: dict[str | None, list[str]] = {None: []}  # names by what is wrong with the files
        for path in visible_files(source, pattern or "*"):
            name = path.relative_to(source).as_posix()
            groups.setdefault(not_text(path), []).append(name)
        taken = groups.pop(None)
        line = f"{source}: took {counted(taken) or 'no file'}"
        for problem, names in groups.items():
            line += f"; left out {counted(names)}, {problem}, the first: {names[0]}"
        if not taken:
            raise FileNotFoundError(f"{line}: give a folder with text, or another --pattern")
        lines.append(line)
        files |= {source / name: name for name in taken}
    return files, lines


def visible_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Returns the sorted files, and links to folders or to nothing, below a folder that match `pattern` and are not hidden.

    Raises `ValueError` for an absolute pattern.
    """
    if Path(pattern).is_absolute():
        raise ValueError(f"the pattern {pattern!r} must match names below a folder, as '*.py'")
    return [
        path
        for path in sorted(folder.rglob(pattern))
        if (path.is_file() or path.is_symlink())
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def counted(names: list[str]) -> str:
    """Returns how many files have which suffix, as in `2 .md, 3 .py`."""
    found = Counter(Path(name).suffix or "without a suffix" for name in names)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(found.items()))


def not_text(path: Path) -> str | None:
    """Says what a path is instead of UTF-8 text, by its beginning; None for text and for rows that are not plain text.

    A few invalid bytes are allowed.
    """
    if not path.is_file():
        return "a link to a folder or to nothing"
    if path.name.endswith(ROW_SUFFIXES[1:]):
        return None
    with open(path, "rb") as file:
        start = file.read(CHUNK)
    if b"\0" in start:
        return "binary"
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(start)
    wrong = len(re.findall("[\udc80-\udcff]", text))
    not_ascii = len(text) - len(text.encode("ascii", "ignore"))
    return "not UTF-8" if 2 * wrong > not_ascii and 1000 * wrong > len(text) else None


def read_text(path: str | Path) -> str:
    """Returns the text of a UTF-8 file.

    Raises `FileNotFoundError` if it does not exist, `ValueError` if it is empty or not UTF-8.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: give a text file")
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it to UTF-8") from error
    if not text:
        raise ValueError(f"{path} is empty: give a file with text")
    return text


@dataclass(frozen=True)
class TextSpan:
    """Bytes [start, end) of a text file; `begins` is True if a document begins at `start`."""

    path: str
    start: int
    end: int
    split: str
    begins: bool
    modified: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def documents(self) -> Iterator[Document]:
        yield Document(self.split, chunks(self.read()), self.begins, self.path)

    def read(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            encoding = "utf-8" if self.start else "utf-8-sig"  # skips a byte-order mark
            decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
            left = self.size
            while left and (data := file.read(min(left, CHUNK))):
                left -= len(data)
                yield decoder.decode(data, final=not left)


def text_spans(files: Mapping[Path, str], part_bytes: int) -> list[TextSpan]:
    """Divides text files into spans of up to `part_bytes`, at the ends of words.

    The files are held out by a hash of their names. If they are then too little or too much of the text, the last
    `VAL_SHARE` of each is held out instead.
    """
    sizes = {path: path.stat().st_size for path in files}
    share = sum(sizes[path] for path, name in files.items() if held_out(name))
    whole = fitting_share(share / (sum(sizes.values()) or 1))
    spans: list[TextSpan] = []
    for path, name in files.items():
        if whole:
            spans += spans_of(path, 0, sizes[path], split_of(held_out(name)), part_bytes)
            continue
        cut = next_cut(path, int(sizes[path] * (1 - VAL_SHARE)))
        spans += spans_of(path, 0, cut, "train", part_bytes)
        if cut < sizes[path]:
            spans += spans_of(path, cut, sizes[path], "val", part_bytes)
    return spans


def spans_of(path: Path, start: int, end: int, split: str, part_bytes: int) -> list[TextSpan]:
    """Divides bytes [start, end) of a text file, which is one document, into spans."""
    modified = path.stat().st_mtime_ns
    cuts = (next_cut(path, place) for place in range(start + part_bytes, end, part_bytes))
    borders = [start, *(cut for cut in cuts if cut < end), end]
    return [
        TextSpan(str(path), left, right, split, left == start, modified)
        for left, right in itertools.pairwise(borders)
        if left < right or end == 0
    ]


# Texts in memory


@dataclass(frozen=True)
class Texts:
    """Documents of each split from memory or iterators."""

    splits: Mapping[str, Iterable[str]]
    size: int = 0

    def documents(self) -> Iterator[Document]:
        for split, texts in self.splits.items():
            for text in texts:
                yield Document(split, chunks([text]))


def tiny_shakespeare(path: str | Path | None = None) -> str:
    """Returns the text of the file `path`, by default tiny Shakespeare, downloaded.

    Raises `OSError` if it cannot be read, and the errors of `read_text`.
    """
    if path is not None:
        return read_text(path)
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE, timeout=8) as response:
            return response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"{TINY_SHAKESPEARE} cannot be read ({first_line(error)}): try again, or give the text by --input FILE"
        ) from error


def split_text(text: str) -> dict[str, list[str]]:
    """Splits a text into its first 90% for training and the rest for validation, as nanoGPT does."""
    cut = int(len(text) * 0.9)
    return {"train": [text[:cut]], "val": [text[cut:]]}


def text_source(text: str, path: str | Path | None = None) -> str:
    """Returns the manifest's source of a text from `tiny_shakespeare(path)`: its file or name, and its SHA-256."""
    found = hashlib.sha256(text.encode()).hexdigest()
    return f"{path or 'tiny Shakespeare'}, SHA-256 {found}"
