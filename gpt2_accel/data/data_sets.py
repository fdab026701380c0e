"""Rows that `datasets` reads: data sets on the Hub or in a folder, and Parquet files.

`datasets` finds and opens the files, decompresses them, and retries when the network fails. A part is a shard of its
stream: row groups of Parquet, whole files of other formats.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Any

from gpt2_accel.data.rows import Row, no_column
from gpt2_accel.data.sources import part_size, reading, text_size
from gpt2_accel.files import first_line

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

SECONDS_TO_ANSWER = 8
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Stream:
    """Rows of a data set. `state` describes the files that they come from.

    If its rows are numbered, `first_row` is the number of its first, and `total_rows` the number of rows of all parts.
    """

    name: str
    state: str
    stream: "IterableDataset" = field(repr=False)
    size: int
    first_row: int = 0
    total_rows: int = 0

    def rows(self) -> Iterator[Row]:
        number = self.first_row
        with reading(self.name):
            for table in self.stream.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
                for value in table.to_pylist():
                    yield Row(value, f"{self.name}, row {number:,}", number)
                    number += 1


def parquet_parts(files: Sequence[str], column: str, shard_tokens: int) -> list[Stream]:
    """Divides local Parquet files into parts. Raises `ValueError` if one is damaged or lacks the `column`."""
    name = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
    builder = open_builder(name, "parquet", data_files={"train": list(files)})
    return stream_parts(builder, name, "train", column, shard_tokens)


def hub_parts(
    name: str,
    *,
    shard_tokens: int,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    data_files: str | None = None,
    column: str = "",
    numbered: bool = False,
) -> tuple[list[Stream], str | None]:
    """Returns the parts of a data set on the Hub or in a folder, and its revision (a commit).

    A `column` of "" means whole rows. With `numbered` a part is a file, and its rows are numbered over all files, which
    must be Parquet.

    Raises `ValueError` if the data set, its configuration, split or column does not exist, `OSError` if the Hub has no such
    data set or cannot be reached.
    """
    revision = pinned_revision(name, revision)
    options = {"name": config, "revision": revision, "data_files": data_files}
    builder = open_builder(name, name, **{key: value for key, value in options.items() if value})
    return stream_parts(builder, name, split, column, shard_tokens, numbered), revision


def stream_parts(
    builder: "DatasetBuilder",
    name: str,
    split: str,
    column: str,
    shard_tokens: int,
    numbered: bool = False,
) -> list[Stream]:
    """Divides a split of a data set into parts; see `hub_parts`."""
    files = (builder.config.data_files or {}).get(split)
    if not files:
        splits = ", ".join(map(str, builder.config.data_files or {})) or "none"
        raise ValueError(f"the data set {name} has no split {split!r}, only {splits}: set --split")
    if numbered and not all(file.endswith(".parquet") for file in files):
        raise ValueError(
            f"the data set {name} is not stored as Parquet, so its rows have no numbers to draw "
            "validation rows from: choose a Parquet --revision, such as refs/convert/parquet"
        )
    if is_parquet := hasattr(builder.config, "columns"):
        builder.config.batch_size = (
            ROWS_AT_ONCE  # by default that of a first row group, which may be empty
        )
    with reading(name):
        stream = builder.as_streaming_dataset(split)
    columns = stream.column_names
    if column and columns and column not in columns:
        raise ValueError(no_column(name, column, columns))
    with reading(name), ThreadPoolExecutor(16) as pool:
        if column and is_parquet:
            builder.config.columns = [column]  # no other is read
            stream = builder.as_streaming_dataset(split)
        states = list(pool.map(state_of, files))
        size = sum(map(text_size, files, (state["size"] for state in states)))
        count = len(files) if numbered else ceil(size / part_size(size, shard_tokens))
        if count > stream.num_shards:
            stream = stream.reshard()
        count = max(1, min(count, stream.num_shards))
        rows = pool.map(rows_of, files) if numbered else [0] * count
        *first_rows, total_rows = accumulate(rows, initial=0)
    names = [name] * count
    if count > 1 and not numbered:
        names = [f"{name}, part {number} of {count}" for number in range(1, count + 1)]
    description = repr((files, states, split, column))
    return [
        Stream(names[i], description, stream.shard(count, i), size // count, first, total_rows)
        for i, first in enumerate(first_rows)
    ]


def state_of(file: str) -> dict[str, Any]:
    """Returns the size in bytes of a local or remote file, 0 if unknown, and the modification time of a local one."""
    import fsspec

    file_system, path = fsspec.core.url_to_fs(file.split("::")[-1])  # zip://NAME::ARCHIVE
    info = file_system.info(path)
    return {"size": info["size"] or 0, "modified": info.get("mtime")}


def rows_of(file: str) -> int:
    """Returns the number of rows of a local or remote Parquet file."""
    import fsspec
    import pyarrow.parquet

    with fsspec.open(file, "rb") as opened:
        return pyarrow.parquet.read_metadata(opened).num_rows


def open_builder(name: str, path: str, /, **options: Any) -> "DatasetBuilder":
    """Returns the `datasets` builder of a data set. Raises `ValueError`, with its `name`, if it cannot be opened."""
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(path, **options)
    except Exception as error:  # for an empty name, an IndexError
        fix = "check its name, --config and --data_files, and the network"
        if "script" in str(error):
            fix = "try --revision refs/convert/parquet"
        raise ValueError(
            f"the data set {name} cannot be opened ({first_line(error)}): {fix}"
        ) from error


def pinned_revision(name: str, revision: str | None) -> str | None:
    """Resolves the `revision` of a data set to a commit; returns `revision` for a local folder or in offline mode.

    One request, so that a wrong name or a missing network is reported within seconds, where `datasets` retries. Raises
    `OSError` if the Hub has no such data set or revision that may be read, or cannot be reached.
    """
    from huggingface_hub import HfApi, constants

    if os.path.exists(name) or constants.HF_HUB_OFFLINE:
        return revision
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=SECONDS_TO_ANSWER).sha
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"the data set {name} cannot be found on the Hub ({first_line(error)}): check its name and the network, log in "
            "if it is not public, or set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from error
