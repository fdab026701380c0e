"""Where documents come from: text, JSON lines and Parquet files, and texts at hand.

Each kind of file has its kind of piece, and a function that cuts a file into such pieces.
"""

import codecs
import hashlib
import io
import itertools
import json
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_accel.data.documents import (
    CHUNK,
    PIECE_BYTES,
    ByHash,
    Document,
    HeldOut,
    Piece,
    chunks,
    hold_out_of,
    next_cut,
    split_of,
)

ROW_SUFFIXES = (
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".parquet",
)  # files of many documents, one a row
SUFFIXES = (".txt", *ROW_SUFFIXES)


# Files


def text_files(source: str | Path, pattern: str | None = None) -> list[Path]:
    """The file `source`, or all files below the folder `source`, sorted: those that match `pattern`, by
    default those that end in one of `SUFFIXES`.

    Raises `FileNotFoundError` if it does not exist or holds no such file.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"{source} does not exist: give a text file or a folder of them")
    files = sorted(path for path in source.rglob(pattern or "*") if path.is_file())
    if pattern is None:
        files = [path for path in files if path.name.endswith(SUFFIXES)]
    if not files:
        wanted = pattern or ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise FileNotFoundError(f"{source} holds no file that matches {wanted}")
    return files


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file. Raises `FileNotFoundError` if there is none, `ValueError` if it is empty
    or not UTF-8."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: give a text file")
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it to UTF-8") from error
    if not text:
        raise ValueError(f"{path} is empty: there is nothing to train on")
    return text


class Span(NamedTuple):
    """Bytes [start, end) of a text file; `begins` says whether a document begins there."""

    path: str
    start: int
    end: int
    split: str
    begins: bool
    modified: int

    def read(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
            left = self.end - self.start
            while left and (data := file.read(min(left, CHUNK))):
                left -= len(data)
                yield decoder.decode(data, final=not left)


@dataclass(frozen=True)
class TextPiece:
    """Text files, each of them one document, or a part of a large one."""

    spans: tuple[Span, ...]
    size: int

    def documents(self) -> Iterator[Document]:
        for span in self.spans:
            yield Document(span.split, chunks(span.read()), span.begins)


@dataclass(frozen=True)
class JsonLinesPiece:
    """The lines of a file that begin in [start, end); the whole of a compressed one, where `end` is None.
    A document is the field `column` of a line."""

    path: str
    start: int
    end: int | None
    column: str
    name: str
    is_held_out: HeldOut
    modified: int
    size: int

    def documents(self) -> Iterator[Document]:
        for offset, line in self.lines():
            if not line.strip():
                continue
            place = f"{self.path}, at byte {offset:,}"
            try:
                row = json.loads(line.decode("utf-8", "surrogateescape"))
            except ValueError as error:
                raise ValueError(
                    f"{place}, holds a line that is not JSON ({error}): correct or remove it"
                ) from error
            text = column_of(row, self.column, place)
            split = split_of(self.is_held_out(f"{self.name}:{offset}"))
            yield Document(split, chunks([text]))

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines with their offsets in the (uncompressed) file."""
        with open_binary(self.path) as file:
            offset = self.start
            if self.start:
                file.seek(self.start - 1)
                offset += len(file.readline()) - 1
            while self.end is None or offset < self.end:
                line = file.readline()
                if not line:
                    return
                yield offset, line
                offset += len(line)


def open_binary(path: str) -> io.BufferedReader:
    """A file to read from, unpacked if its name ends in .gz or .zst."""
    if not path.endswith((".gz", ".zst")):
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="detect"), CHUNK)


def column_of(row: Any, column: str, place: str) -> str:
    """The text of a row, empty where it has none. Raises `ValueError` if there is no such column."""
    if not isinstance(row, dict) or column not in row:
        there = ", ".join(row) if isinstance(row, dict) else f"it is a {type(row).__name__}"
        raise ValueError(f"{place}, has no column {column!r}: choose one of {there} by --column")
    return row[column] if isinstance(row[column], str) else ""


@dataclass(frozen=True)
class ParquetPiece:
    """Row groups of a Parquet file, of this machine or of the Hub; a document is a row's `column`.
    Rows are named by `name` and their number, counted from `first_row`."""

    url: str
    groups: tuple[int, ...]
    first_row: int
    column: str
    name: str
    is_held_out: HeldOut
    modified: int
    size: int

    def documents(self) -> Iterator[Document]:
        row = itertools.count(self.first_row)
        with open_parquet(self.url) as file:
            for batch in file.iter_batches(256, row_groups=self.groups, columns=[self.column]):
                for text in batch.column(0).to_pylist():
                    split = split_of(self.is_held_out(f"{self.name}{next(row)}"))
                    yield Document(split, chunks([text if isinstance(text, str) else ""]))


def open_parquet(url: str):
    """A `pyarrow.parquet.ParquetFile`. Raises `ValueError` if it cannot be read as one."""
    import fsspec
    import pyarrow
    import pyarrow.parquet

    file_system, path = fsspec.core.url_to_fs(url)
    try:
        return pyarrow.parquet.ParquetFile(file_system.open(path, "rb"))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{url} is not a whole Parquet file ({error}): fetch it again") from error


def parquet_pieces(
    url: str, column: str, name: str, is_held_out: HeldOut, piece_bytes: int, first_row: int = 0
) -> list[ParquetPiece]:
    """A Parquet file as pieces of whole row groups."""
    modified = Path(url).stat().st_mtime_ns if Path(url).exists() else 0
    with open_parquet(url) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(
                f"{url} has no column {column!r}: choose one of {', '.join(names)} by --column"
            )
        place = names.index(column)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    pieces, numbers, size, rows = [], [], 0, 0
    for number, group in enumerate(groups):
        numbers.append(number)
        size += group.column(place).total_uncompressed_size
        rows += group.num_rows
        if size >= piece_bytes or number == len(groups) - 1:
            pieces.append(
                ParquetPiece(
                    url, tuple(numbers), first_row, column, name, is_held_out, modified, size
                )
            )
            first_row += rows
            numbers, size, rows = [], 0, 0
    return pieces


def file_pieces(
    files: dict[Path, str],
    column: str = "text",
    piece_bytes: int = PIECE_BYTES,
) -> list[Piece]:
    """Files, with the names by which their documents are held out, as pieces.

    A row's name is its file's and its place there. Where all documents are text files, at least one of
    several is held out.
    """
    pieces: list[Piece] = []
    rows = [name for path, name in files.items() if path.name.endswith(ROW_SUFFIXES)]
    text_is_held_out = ByHash() if rows else hold_out_of(files.values())
    for path, name in files.items():
        if path.suffix == ".parquet":
            pieces += parquet_pieces(str(path), column, f"{name}:", ByHash(), piece_bytes)
        elif name in rows:
            pieces += json_pieces(path, column, name, ByHash(), piece_bytes)
        else:
            end = path.stat().st_size
            spans = text_spans(path, 0, end, split_of(text_is_held_out(name)), piece_bytes)
            pieces += [TextPiece((span,), span.end - span.start) for span in spans]
    return join_texts(pieces, piece_bytes)


def json_pieces(
    path: Path, column: str, name: str, is_held_out: HeldOut, piece_bytes: int
) -> list[JsonLinesPiece]:
    """A file of JSON lines as pieces; a compressed one, which can be read from its start only, as one."""
    info = path.stat()
    rest = (column, name, is_held_out, info.st_mtime_ns)
    if path.suffix != ".jsonl":
        return [JsonLinesPiece(str(path), 0, None, *rest, size=3 * info.st_size)]
    return [
        JsonLinesPiece(str(path), start, end, *rest, size=end - start)
        for start in range(0, info.st_size, piece_bytes)
        for end in [min(start + piece_bytes, info.st_size)]
    ]


def text_spans(path: Path, start: int, end: int, split: str, piece_bytes: int) -> list[Span]:
    """Bytes [start, end) of a text file, one document, in spans of about `piece_bytes`."""
    modified = path.stat().st_mtime_ns
    cuts = (next_cut(path, place) for place in range(start + piece_bytes, end, piece_bytes))
    borders = [start, *(cut for cut in cuts if cut is not None and cut < end), end]
    return [
        Span(str(path), left, right, split, left == start, modified)
        for left, right in itertools.pairwise(borders)
    ]


def one_text_pieces(path: Path, val_share: float, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """A single text file as pieces, the last `val_share` of it for validation."""
    end = path.stat().st_size
    cut = next_cut(path, int(end * (1 - val_share))) or end
    spans = text_spans(path, 0, cut, "train", piece_bytes)
    spans += text_spans(path, cut, end, "val", piece_bytes)
    return [TextPiece((span,), span.end - span.start) for span in spans]


def join_texts(pieces: list[Piece], piece_bytes: int) -> list[Piece]:
    """Joins neighbouring small text files to pieces of about `piece_bytes`."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            isinstance(piece, TextPiece)
            and isinstance(last, TextPiece)
            and last.size + piece.size <= piece_bytes
        ):
            joined[-1] = TextPiece(last.spans + piece.spans, last.size + piece.size)
        else:
            joined.append(piece)
    return joined


# Texts at hand

TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


def tiny_shakespeare(path: str | Path | None = None) -> str:
    """nanoGPT's first text, downloaded, or what `path` holds instead of it.

    Raises `OSError` if it cannot be had."""
    if path is not None:
        return read_text(path)
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE, timeout=8) as response:
            return response.read().decode()
    except OSError as error:
        raise OSError(
            f"{TINY_SHAKESPEARE} cannot be read ({error}): give the text by --input FILE"
        ) from error


def split_text(text: str) -> dict[str, list[str]]:
    """The first 90% of a text for training, the rest for validation, as nanoGPT splits tiny Shakespeare."""
    cut = int(len(text) * 0.9)
    return {"train": [text[:cut]], "val": [text[cut:]]}


def text_source(text: str, path: str | Path | None = None) -> str:
    """What the manifest says of a text from `tiny_shakespeare(path)`: its file, if it has one, and its SHA-256."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{path or 'tiny Shakespeare'}, SHA-256 {digest}"


@dataclass(frozen=True)
class Texts:
    """Documents of one split that are in memory, or come from an iterator."""

    split: str
    texts: Iterable[str]
    size: int = 0

    def documents(self) -> Iterator[Document]:
        for text in self.texts:
            yield Document(self.split, chunks([text]))
