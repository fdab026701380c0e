"""Rows of files, local or remote, in order: JSON, CSV and Parquet."""

import codecs
import csv
import io
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpt2_accel.data.documents import CHUNK
from gpt2_accel.runtime.files import first_line, parse_json

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SEPARATORS = {".csv": ",", ".tsv": "\t"}
ROW_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", *SEPARATORS)  # also before COMPRESSED
ROWS_AT_ONCE = 256  # of Parquet


def row_suffix(path: str | os.PathLike) -> str:
    """Returns which of `ROW_SUFFIXES` a file has, in any case; an empty text for other files."""
    name, suffix = os.path.splitext(str(path).lower())
    if suffix in COMPRESSED:
        suffix = os.path.splitext(name)[1]
    return suffix if suffix in ROW_SUFFIXES else ""


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


def place_of(path: str) -> tuple["AbstractFileSystem", str]:
    """Returns the file system of a local or remote file, and the file's name there."""
    import fsspec

    if os.path.exists(path):  # also if its name has ::, which joins URLs
        return fsspec.filesystem("file"), path
    return fsspec.core.url_to_fs(path)


def open_file(path: str) -> io.BufferedReader:
    """Opens a local or remote file for reading, and decompresses it by its suffix."""
    file_system, name = place_of(path)
    file = file_system.open(name)
    if compression := COMPRESSED.get(os.path.splitext(path.lower())[1]):
        import pyarrow

        file = pyarrow.CompressedInputStream(file, compression)
    return io.BufferedReader(file, CHUNK)


def read_rows(path: str, column: str = "", strict: bool = False) -> Iterator[tuple[Any, str]]:
    """Yields the rows of a file, each with its place for messages, such as `FILE, line 3`.

    With `column`, rows of Parquet have that column only. Rows of CSV hold texts. A file of JSON has
    a row per line, or is one array of rows, or one row over several lines. Raises `ValueError` if
    the file cannot be read, for a line that is not JSON, or with `strict` not UTF-8, and for
    Parquet without the column.
    """
    suffix = row_suffix(path)
    if suffix == ".parquet":
        yield from parquet_rows(path, column)
        return
    if suffix in SEPARATORS:
        yield from csv_rows(path, SEPARATORS[suffix], strict)
        return
    for number, line in enumerate(read_lines(path), 1):
        place = f"{path}, line {number:,}"
        if not line.strip():
            continue
        text = line if strict else line.decode("utf-8-sig", "surrogateescape")
        value = parse_line(text, place)
        if isinstance(value, list) and number == 1:
            yield from ((row, f"{path}, element {i:,}") for i, row in enumerate(value))
        else:
            yield value, place


def read_lines(path: str) -> Iterator[bytes]:
    """Yields the lines of a file of JSON, or at once the content of a file that begins with an
    array or with an object over several lines."""
    with reading(path), open_file(path) as file:
        start = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()
        if re.match(rb"\[|{\s*\n", start):
            yield file.read()
        else:
            yield from file


def parse_line(line: str | bytes, place: str) -> Any:
    """Parses a line of JSON. Raises `ValueError`, with `place` before the reason, if it is not JSON, or bytes not UTF-8."""
    try:
        return parse_json(line)
    except ValueError as error:
        reason = re.sub(r"( at)?: line 1 (column \d+) .*", r" at \2", str(error))
        raise ValueError(
            f"{place}, is not valid JSON in UTF-8 ({reason}): correct, convert or remove it"
        ) from error


def parquet_rows(path: str, column: str) -> Iterator[tuple[Any, str]]:
    """Yields what `read_rows` yields, of a Parquet file."""
    from pyarrow.parquet import ParquetFile

    with reading(path):
        file = ParquetFile(open_file(path))
    if column and column not in file.schema_arrow.names:
        raise ValueError(no_column(path, column, file.schema_arrow.names))
    number = 0
    with reading(path), file:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column] if column else None):
            for value in batch.to_pylist():
                yield value, f"{path}, row {number:,}"
                number += 1


def csv_rows(path: str, separator: str, strict: bool) -> Iterator[tuple[dict, str]]:
    """Yields what `read_rows` yields, of a file whose first line has the columns' names. Every
    value is a text: a library that guesses types takes NA, null and None for missing values."""
    csv.field_size_limit(2**31 - 1)
    with reading(path), open_file(path) as file:
        errors = "strict" if strict else "surrogateescape"
        lines = io.TextIOWrapper(file, "utf-8-sig", errors, newline="")
        rows = csv.DictReader(lines, delimiter=separator, strict=True)
        names = rows.fieldnames or []
        if len(set(names)) < len(names):
            raise ValueError(f"two of its columns have one name: {', '.join(names)}")
        for row in rows:
            place = f"line {rows.line_num:,}"
            if None in row or None in row.values():
                raise ValueError(f"{place} has more or fewer values than there are columns")
            yield row, f"{path}, {place}"


def column_of(row: Any, column: str, place: str) -> str:
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
    fix = f"give --column {' or --column '.join(map(shlex.quote, columns))}"
    if {"messages", "conversations"} & set(columns):
        fix = "they are conversations, prepare them by the command chat"
    return f"{place} has no column {column!r}: {fix}"
