"""Rows of files: JSON lines and arrays. `data_sets.py` has those of Parquet and of data sets on the Hub."""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gpt2_accel.data.documents import CHUNK, Document, Rule, chunks
from gpt2_accel.data.sources import reading, text_size
from gpt2_accel.files import parse_json


class Row(NamedTuple):
    """A row of a data set. `place`, as `str`, names it in messages. `number` counts the rows of a `Stream`."""

    value: Any
    place: object
    number: int = -1


class Rows(Protocol):
    """A part of a corpus that has rows; see `Source`."""

    size: int

    def rows(self) -> Iterator[Row]: ...


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
    modified: int

    @property
    def size(self) -> int:
        return text_size(self.path, self.end - self.start)

    def rows(self) -> Iterator[Row]:
        for offset, line in self.lines():
            if line.strip():
                place = LineNumber(self.path, offset)
                yield Row(parse_line(line, place), place)

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
    return path.endswith((".gz", ".zst"))


def open_binary(path: str) -> io.BufferedReader:
    """Opens a file for reading, and decompresses it if its name ends in .gz or .zst."""
    if not is_compressed(path):
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="detect"), CHUNK)


def parse_line(line: bytes, place: object) -> Any:
    """Parses a line of JSON. Raises `ValueError`, with `place` before the reason, if it is not JSON."""
    try:
        return parse_json(line.decode("utf-8-sig", "surrogateescape"))
    except ValueError as error:
        reason = re.sub(r": line 1 (column \d+) .*", r" at \1", str(error))
        raise ValueError(f"{place}, is not valid JSON ({reason}): correct or remove it") from error


@dataclass(frozen=True)
class JsonArray:
    """The elements of a file that holds one JSON array."""

    path: str
    modified: int
    size: int

    def rows(self) -> Iterator[Row]:
        text = Path(self.path).read_bytes().decode("utf-8-sig", "surrogateescape")
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(
                f"{self.path} is not valid JSON ({error}): correct it, or write one object per line as .jsonl"
            ) from error
        for number, value in enumerate(values):
            yield Row(value, f"{self.path}, element {number:,}")


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
        for value, place, number in self.part.rows():
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
