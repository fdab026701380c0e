"""Sources of text: files of plain text, files of rows, and texts in memory."""

import codecs
import hashlib
import http.client
import itertools
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from gpt2_accel.data.documents import (
    CHUNK,
    VAL_SHARE,
    Document,
    Rule,
    by_hash,
    by_number,
    chunks,
    fitting_share,
    held_out,
    last_part,
    next_cut,
    split_of,
)
from gpt2_accel.data.rows import column_of, count_rows, read_rows, reading
from gpt2_accel.files import first_line

ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # files with one document per row
COMPRESSION = {".parquet": 2, ".gz": 3, ".zst": 3}  # about
SAMPLED_ROWS = 2000  # that decide how rows are held out
TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


@dataclass(frozen=True)
class Texts:
    """Documents of each split from memory or iterators."""

    splits: Mapping[str, Iterable[str]]
    size: int = 0

    def documents(self) -> Iterator[Document]:
        for split, texts in self.splits.items():
            for text in texts:
                yield Document(split, chunks([text]))


@dataclass(frozen=True)
class TextFile:
    """A file of plain text, one document. Without a `split` its last `VAL_SHARE` is for validation."""

    path: Path
    size: int
    modified: float
    split: str | None

    def documents(self) -> Iterator[Document]:
        cut = self.size
        if self.split is None:
            cut = next_cut(self.path, int(self.size * (1 - VAL_SHARE)))
        yield Document(self.split or "train", chunks(self.read(0, cut)), str(self.path))
        yield Document("val", chunks(self.read(cut, self.size)), str(self.path))

    def read(self, start: int, end: int) -> Iterator[str]:
        """Yields the text in bytes [start, end), without a byte-order mark."""
        with open(self.path, "rb") as file:
            file.seek(start)
            encoding = "utf-8" if start else "utf-8-sig"
            decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
            while data := file.read(min(end - file.tell(), CHUNK)):
                yield decoder.decode(data, final=file.tell() == end)


@dataclass(frozen=True)
class RowFile:
    """A local or remote file with a document in the `column` of each row, held out by `rule`.

    `modified` is None for a remote file: its path names the commit.
    """

    path: str
    size: int
    modified: float | None
    column: str
    rule: Rule = field(default=by_hash, repr=False)

    def documents(self) -> Iterator[Document]:
        for number, (row, place) in enumerate(read_rows(self.path, self.column)):
            for split, text in self.rule(column_of(row, self.column, place), number):
                yield Document(split, chunks([text]), place)


Source = Texts | TextFile | RowFile
"""A part of a corpus. `size` is an estimate of its text in bytes; the `repr` changes with the text."""

# Files of a corpus


def corpus_files(names: Mapping[Path, str], column: str) -> list[Source]:
    """Returns the sources of files, given with their names: first plain text, then rows.

    Plain text is held out by a hash of the name. If that is too little or too much of the text, the last `VAL_SHARE` of each
    file is held out instead. Raises `ValueError` if the first rows are not documents with a text in `column`.
    """
    states = {path: path.stat() for path in names if not path.name.endswith(ROW_SUFFIXES)}
    sizes = {path: state.st_size for path, state in states.items()}
    share = sum(size for path, size in sizes.items() if held_out(names[path]))
    whole = fitting_share(share / (sum(sizes.values()) or 1))
    texts = [
        TextFile(
            path, sizes[path], state.st_mtime, split_of(held_out(names[path])) if whole else None
        )
        for path, state in states.items()
    ]
    return [*texts, *row_files([str(path) for path in names if path not in states], column)]


def row_files(paths: Sequence[str], column: str, rule: Rule | None = None) -> list[RowFile]:
    """Returns the sources of files of rows.

    Without a `rule`, rows are held out `by_hash` if that is a fitting share of the text in the first `SAMPLED_ROWS`
    rows, else by `last_part`. Raises `ValueError` if one of these rows has no text in `column`.
    """
    files = [RowFile(path, *state_of(path), column, rule or by_hash) for path in paths]
    if rule is not None:
        return files
    sizes = {"train": 0, "val": 0}
    documents = itertools.chain.from_iterable(file.documents() for file in files)
    for document in itertools.islice(documents, SAMPLED_ROWS):
        sizes[document.split] += sum(map(len, document.chunks))
    if fitting_share(sizes["val"] / (sum(sizes.values()) or 1)):
        return files
    return [replace(file, rule=last_part) for file in files]


def drawn_files(paths: Sequence[str], column: str, share: float, seed: int) -> list[RowFile]:
    """Returns the sources of Parquet files, of whose rows the `share` is held out that `train_test_split` of `datasets`
    draws with `seed`."""
    counts = [count_rows(path) for path in paths]
    order = np.random.default_rng(seed).permutation(sum(counts))
    drawn = frozenset(order[: int(np.ceil(share * len(order)))].tolist())
    starts = itertools.accumulate(counts, initial=0)
    return [
        RowFile(path, *state_of(path), column, partial(by_number, drawn, first))
        for path, first in zip(paths, starts, strict=False)
    ]


def state_of(path: str) -> tuple[int, float | None]:
    """Returns an estimate of the text in a local or remote file, in bytes, and the modification time of a local one."""
    import fsspec

    file_system, name = fsspec.core.url_to_fs(path)
    with reading(path):
        info = file_system.info(name)
    return info["size"] * COMPRESSION.get(Path(path).suffix, 1), info.get("mtime")


def find_files(
    source: str | Path, accepts: Callable[[Path], bool], kind: str, pattern: str | None = None
) -> dict[Path, str]:
    """Finds a file, or the sorted files below a folder that match `pattern` and are not hidden; returns those that
    `accepts` takes, with their names below the folder. Prints for a folder how many files are taken and left out.

    Raises `FileNotFoundError` if the source does not exist, `ValueError` if no file is of the `kind`.
    """
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: give a file or a folder")
    found = {source: source.name}
    if source.is_dir():
        paths = [path for path in sorted(source.rglob("*")) if path.match(pattern or "*")]
        names = {
            p: p.relative_to(source).as_posix() for p in paths if p.is_file() or p.is_symlink()
        }
        found = {path: name for path, name in names.items() if "/." not in f"/{name}"}
    taken = {path: name for path, name in found.items() if accepts(path)}
    others = [path for path in found if path not in taken]
    line = f"{source}: took {len(taken):,} files"
    if others:
        line += f"; left out {len(others):,}, not {kind}, the first: {others[0].name}"
    if not taken:
        raise ValueError(f"{line}: give {kind}, or another --pattern of a folder's files")
    if source.is_dir():
        print(line, file=sys.stderr)
    return taken


def is_text(path: Path) -> bool:
    """Whether a path is a file of rows, or of UTF-8 text by its beginning; a few invalid bytes are allowed."""
    if path.name.endswith(ROW_SUFFIXES[1:]) or not path.is_file():
        return path.is_file()
    with open(path, "rb") as file:
        text = file.read(CHUNK).decode("utf-8", "replace")
    return "\0" not in text and 1000 * text.count("\ufffd") <= len(text)


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


# One text


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
