"""Rows of files, local or remote, in order: JSON, Parquet, CSV, and Arrow as datasets saves it."""

import codecs
import csv
import io
import os
import re
import shlex
import zipfile
from collections.abc import Iterator
from typing import Any

from gpt2_accel.data.documents import CHUNK, reading
from gpt2_accel.runtime.files import check_pointer, parse_json

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# A suffix of COMPRESSED may follow.
ROW_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".arrow")
ROWS_AT_ONCE = 256  # rows of a Parquet file that are decoded together


def row_suffix(path: str | os.PathLike | zipfile.Path) -> str:
    """Returns which of `ROW_SUFFIXES` a file has, in any case; an empty string for other files."""
    name, suffix = os.path.splitext(str(path).lower())
    if suffix in COMPRESSED:
        suffix = os.path.splitext(name)[1]
    return suffix if suffix in ROW_SUFFIXES else ""


def open_file(path: str | zipfile.Path) -> io.BufferedReader:
    """Opens a local or remote file for reading, and decompresses it by its suffix."""
    import fsspec

    file: Any
    if isinstance(path, zipfile.Path):
        file = path.open("rb")
    else:
        file_system, name = fsspec.core.url_to_fs(path)
        file = file_system.open(name)
    compression = COMPRESSED.get(os.path.splitext(str(path).lower())[1])
    if compression:
        import pyarrow

        file = pyarrow.CompressedInputStream(file, compression)
    return io.BufferedReader(file, CHUNK)


def read_rows(path: str | zipfile.Path, column: str = "") -> Iterator[tuple[Any, str]]:
    """Yields the rows of a file, each with its place for messages, such as `FILE, line 3`.

    With `column`, rows of Parquet have that column only, if it is there. All values of CSV are
    texts. A file of JSON has a row per line, or is one array of rows, or one row over several
    lines. Raises `ValueError` if the file cannot be read, and for a line that is not JSON in UTF-8.
    """
    check_pointer(str(path))
    readers = {".parquet": parquet_rows, ".csv": csv_rows, ".arrow": arrow_rows}
    read = readers.get(row_suffix(path))
    if read:
        with reading(str(path)), open_file(path) as file:
            for number, value in enumerate(read(file, column), 1):
                yield value, f"{path}, row {number:,}"
        return
    for number, line in enumerate(read_lines(path), 1):
        place = f"{path}, line {number:,}"
        if isinstance(line, list):
            for i, row in enumerate(line, 1):
                yield row, f"{path}, element {i:,}"
        elif line.strip():
            try:
                yield parse_json(line), place
            except ValueError as error:
                raise ValueError(
                    f"{place}, is not valid JSON in UTF-8 ({error}): correct, convert or remove it"
                ) from error


def read_lines(path: str | zipfile.Path) -> Iterator[bytes | list]:
    """Yields the lines of a file of JSON, or one list if it is an array.

    A file that begins with an object over several lines is one line.
    """
    with reading(str(path)), open_file(path) as file:
        start = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()
        if not re.match(rb"\[|{\s*\n", start):
            yield from file
            return
        content = file.read()
    if start[:1] == b"{":
        yield content
        return
    try:
        yield parse_json(content)
    except ValueError:  # lines that are arrays
        yield from content.splitlines()


def csv_rows(file: io.BufferedReader, column: str) -> Iterator[dict]:
    """Yields the rows of CSV. Raises `ValueError` for one that does not fit the header, for two
    columns of one name, and for columns that are not separated by commas."""
    csv.field_size_limit(2**31 - 1)  # the default refuses long texts
    reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    names = reader.fieldnames or [""]
    for other in "\t;|":
        if other in "".join(names) and column not in names and (column or len(names) == 1):
            raise ValueError(f"its header has a {other!r}: save it with commas between the columns")
    if len(set(names)) < len(names):
        raise ValueError("two of its columns have the same name: rename one")
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(
                f"line {reader.line_num:,} has more or fewer values than the header: put quotes "
                "around values with commas"
            )
        yield row


def arrow_rows(file: io.BufferedReader, _: str) -> Iterator[dict]:
    """Yields the rows of a stream of Arrow."""
    from pyarrow.ipc import open_stream

    for batch in open_stream(file):
        yield from batch.to_pylist()


def parquet_rows(file: io.BufferedReader, column: str) -> Iterator[dict]:
    """Yields the rows of Parquet, with all columns if `column` is not one of them."""
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(file)
    columns = [column] if column in parquet.schema_arrow.names else None
    for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=columns):
        yield from batch.to_pylist()


def column_of(row: Any, column: str, place: str) -> str:
    """Returns the text of a row, an empty string for null.

    Raises `ValueError` if the column is missing or holds something else.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}, holds a value of type {type(row).__name__}, not an object: write "
            f"{{{column!r}: …}}, one per line"
        )
    if column not in row:
        named = [shlex.quote(name) for name, value in row.items() if isinstance(value, str)]
        fix = " or ".join([f"give --column {name}" for name in named] + ["leave the file out"])
        if {"messages", "conversations"} & row.keys():
            fix = "they are conversations, prepare them by the command chat"
        raise ValueError(f"{place}, has no column {column!r}: {fix}")
    value = row[column]
    if not isinstance(value, str | None):
        raise ValueError(
            f"{place}, has a value of type {type(value).__name__} in {column!r}, not a text: "
            "choose another by --column, or correct it"
        )
    return value or ""
