"""Rows of files: JSON lines, JSON arrays and Parquet. `data_sets.py` has those of data sets on the Hub.

JSON lines are divided by byte ranges, and a bad line is named with its number. Parquet is divided by row groups.
"""

import codecs
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from gpt2_accel.data.documents import (
    CHUNK,
    ByHash,
    Document,
    Drawn,
    LastPart,
    Rule,
    chunks,
    drawn_rows,
    fitting_share,
)
from gpt2_accel.data.sources import (
    ROW_SUFFIXES,
    Source,
    join,
    part_size,
    reading,
    text_size,
    text_spans,
)
from gpt2_accel.files import parse_json

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

State = tuple[int, float | None]
"""The size of a file in bytes, and its modification time, None for a remote file: its path names the commit."""

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
SAMPLED_ROWS = 2000  # whose lengths decide how rows are held out
ROWS_AT_ONCE = 256  # of Parquet


class Row(NamedTuple):
    """A row of a data set. `place`, as `str`, names it in messages."""

    value: Any
    place: object


class Rows(Protocol):
    """A part of a corpus that has rows; see `Source`."""

    size: int

    def rows(self) -> Iterator[Row]: ...


# JSON


class LineNumber(NamedTuple):
    """The line at a byte offset of a file. `str` of it is `FILE, line N`, and reads the file: it is for a message."""

    path: str
    offset: int

    def __str__(self) -> str:
        number, left = 1, self.offset
        with open_binary(self.path) as file:
            while left and (data := file.read(min(left, CHUNK))):
                number, left = number + data.count(b"\n"), left - len(data)
        return f"{self.path}, line {number:,}"


@dataclass(frozen=True)
class JsonLines:
    """The JSON lines of a file that begin in bytes [start, end); a compressed file is one part."""

    path: str
    start: int
    end: int
    state: State

    @property
    def size(self) -> int:
        return text_size(self.path, self.end - self.start)

    def rows(self) -> Iterator[Row]:
        for offset, line in self.lines():
            if line.strip():
                place = LineNumber(self.path, offset)
                yield Row(parse_line(line.decode("utf-8-sig", "surrogateescape"), place), place)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields the lines with their byte offsets in the uncompressed file."""
        with open_binary(self.path) as file, reading(self.path):
            offset = self.start
            if self.start:
                file.seek(self.start - 1)
                offset += len(file.readline()) - 1
            while (offset < self.end or is_compressed(self.path)) and (line := file.readline()):
                yield offset, line
                offset += len(line)


def is_compressed(path: str) -> bool:
    """Whether `open_binary` decompresses a file."""
    return path.endswith(tuple(COMPRESSED))


def open_file(path: str) -> IO[bytes]:
    """Opens a local or remote file for reading."""
    if "://" not in path:
        return open(path, "rb")
    import fsspec

    return io.BufferedReader(fsspec.open(path).open(), CHUNK)


def open_binary(path: str) -> IO[bytes]:
    """Opens a file for reading, and decompresses it if its name ends in .gz or .zst."""
    if not is_compressed(path):
        return open_file(path)
    import pyarrow

    stream = pyarrow.CompressedInputStream(open_file(path), COMPRESSED[Path(path).suffix])
    return io.BufferedReader(stream, CHUNK)


def parse_line(line: str, place: object) -> Any:
    """Parses a line of JSON. Raises `ValueError`, with `place` before the reason, if it is not JSON."""
    try:
        return parse_json(line)
    except ValueError as error:
        reason = re.sub(r": line 1 (column \d+) .*", r" at \1", str(error))
        raise ValueError(f"{place}, is not valid JSON ({reason}): correct or remove it") from error


@dataclass(frozen=True)
class JsonArray:
    """The elements of a file that holds one JSON array."""

    path: str
    state: State

    @property
    def size(self) -> int:
        return self.state[0]

    def rows(self) -> Iterator[Row]:
        with reading(self.path), open_file(self.path) as file:
            text = file.read().decode("utf-8-sig", "surrogateescape")
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(
                f"{self.path} is not valid JSON ({error}): correct it, or write one object per line as .jsonl"
            ) from error
        for number, value in enumerate(values):
            yield Row(value, f"{self.path}, element {number:,}")


def begins_with_a_bracket(path: str) -> bool:
    """Whether a JSON file holds an array, and not an object per line."""
    with reading(path), open_file(path) as file:
        blocks = iter(lambda: file.read(4096), b"")
        texts = (block.removeprefix(codecs.BOM_UTF8).lstrip() for block in blocks)
        return next(filter(None, texts), b"").startswith(b"[")


# Parquet


@dataclass(frozen=True)
class ParquetRows:
    """`count` rows of a Parquet file, local or remote, from row `first` on, which are the row groups [start, end).

    `state` is that of the file. A `column` of "" means whole rows.
    """

    path: str
    state: State
    column: str
    start: int
    end: int
    first: int
    count: int
    size: int

    def rows(self) -> Iterator[Row]:
        groups, columns = range(self.start, self.end), [self.column] if self.column else None
        number = self.first
        with reading(self.path), open_parquet(self.path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, groups, columns, use_threads=False):
                for value in batch.to_pylist():
                    yield Row(value, f"{self.path}, row {number:,}")
                    number += 1


def open_parquet(path: str) -> "ParquetFile":
    """Opens a local or remote Parquet file."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(open_file(path))


def parquet_parts(
    path: str, state: State, row_groups: list[int], column: str, part_bytes: int
) -> list[ParquetRows]:
    """Divides a Parquet file, of whose row groups each has a number of rows, into parts."""
    size = text_size(path, state[0])
    number = max(1, min(len(row_groups), ceil(size / part_bytes)))
    borders = [len(row_groups) * i // number for i in range(number + 1)]
    parts = []
    for start, end in itertools.pairwise(borders):
        rows = sum(row_groups[:start]), sum(row_groups[start:end])
        parts.append(ParquetRows(path, state, column, start, end, *rows, size // number))
    return parts


def count_rows(path: str, column: str) -> list[int]:
    """Returns the number of rows of each row group of a Parquet file, none for another file.

    Raises `ValueError` if the file is damaged or lacks the column.
    """
    if not path.endswith(".parquet"):
        return []
    with reading(path), open_parquet(path) as file:
        names, metadata = file.schema_arrow.names, file.metadata
    if column and column not in names:
        raise ValueError(no_column(path, column, names))
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


# Documents in rows


@dataclass(frozen=True)
class Column:
    """The documents in one `column` of rows, held out by `rule`."""

    part: Rows
    column: str
    rule: Rule

    @property
    def size(self) -> int:
        return self.part.size

    def documents(self) -> Iterator[Document]:
        for number, (value, place) in enumerate(self.part.rows()):
            for split, text in self.rule(column_of(value, self.column, place), number):
                yield Document(split, chunks([text]), place=place)


def column_of(row: Any, column: str, place: object) -> str:
    """Returns the text of a row, empty for null. Raises `ValueError` if the column is missing or not a text."""
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}, holds a value of type {type(row).__name__}, not an object: write {{{column!r}: …}}, one per line"
        )
    if column not in row:
        raise ValueError(no_column(f"{place},", column, row))
    if not isinstance(row[column], str | None):
        raise ValueError(
            f"{place}, has a value of type {type(row[column]).__name__} in {column!r}, not a text: choose another by "
            "--column, or correct it"
        )
    return row[column] or ""


def no_column(place: str, column: str, columns: Iterable[str]) -> str:
    """Returns the message for rows that lack a column."""
    fix = f"give --column {' or --column '.join(columns)}"
    if {"messages", "conversations"} & set(columns):
        fix = "they are conversations, prepare them by the command chat"
    return f"{place} has no column {column!r}: {fix}"


# Parts of a corpus


def file_parts(files: dict[Path, str], column: str, shard_tokens: int) -> list[Source]:
    """Divides files (`text_files`) into the parts of a corpus: first plain text, then rows, each in the files' order.

    Raises `ValueError` if the first rows are not documents with a text in `column`.
    """
    texts = {path: name for path, name in files.items() if not path.name.endswith(ROW_SUFFIXES)}
    rows = row_parts([str(path) for path in files if path not in texts], shard_tokens, column)
    size = sum(path.stat().st_size for path in texts) + sum(part.size for part in rows)
    part_bytes = part_size(size, shard_tokens)
    return join([*text_spans(texts, part_bytes), *columns(rows, column)], part_bytes)


def columns(parts: Sequence[Rows], column: str) -> list[Column]:
    """Returns the documents in a column of rows.

    They are held out `ByHash` if that is a fitting share of the text in the first `SAMPLED_ROWS` rows, else by `LastPart`.
    """
    rows = (row for part in parts for row in part.rows())
    sizes = {"train": 0, "val": 0}
    for row in itertools.islice(rows, SAMPLED_ROWS):
        for split, text in ByHash()(column_of(row.value, column, row.place), 0):
            sizes[split] += len(text)
    whole = fitting_share(sizes["val"] / (sum(sizes.values()) or 1))
    return [Column(part, column, ByHash() if whole else LastPart()) for part in parts]


def drawn_columns(
    parts: Sequence[ParquetRows], column: str, share: float, seed: int
) -> list[Column]:
    """Returns the documents in a column of rows; `drawn_rows` says which are held out."""
    total = sum(part.count for part in parts)
    drawn, found, before = drawn_rows(total, share, seed), [], 0
    for part in parts:
        own = frozenset(row - before for row in drawn if before <= row < before + part.count)
        found.append(Column(part, column, Drawn(own)))
        before += part.count
    return found


def state_of(path: str) -> State:
    """Returns the size in bytes of a local or remote file, and the modification time of a local one."""
    import fsspec

    file_system, name = fsspec.core.url_to_fs(path)
    with reading(path):
        info = file_system.info(name)
    return info["size"], info.get("mtime")


def row_parts(paths: Sequence[str], shard_tokens: int, column: str = "") -> list[Rows]:
    """Divides files, local or remote, into parts of rows, in order: Parquet, JSON arrays (.json) and JSON lines.

    A `column` of "" means whole rows. Raises `ValueError` for a Parquet file that is damaged or lacks the column.
    """
    with ThreadPoolExecutor(16) as pool:  # of requests
        states = list(pool.map(state_of, paths))
        row_groups = list(pool.map(count_rows, paths, itertools.repeat(column)))
    sizes = [text_size(path, size) for path, (size, _) in zip(paths, states, strict=True)]
    part_bytes = part_size(sum(sizes), shard_tokens)
    parts: list[Rows] = []
    for path, state, groups in zip(paths, states, row_groups, strict=True):
        if path.endswith(".parquet"):
            parts += parquet_parts(path, state, groups, column, part_bytes)
        elif path.endswith(".json") and begins_with_a_bracket(path):
            parts.append(JsonArray(path, state))
        else:
            size = state[0]
            step = max(1, size if is_compressed(path) else part_bytes)
            starts = range(0, size, step)
            parts += [JsonLines(path, start, min(start + step, size), state) for start in starts]
    return parts
