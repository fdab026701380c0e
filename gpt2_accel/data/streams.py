"""Rows that `datasets` reads: data sets on the Hub or in a folder, and Parquet files.

`datasets` finds and opens the files, decompresses them, and retries when the network fails. A part is a shard of its
stream: row groups of Parquet, whole files of other formats.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Any

from gpt2_accel.data.rows import Row, RowNumber, no_column
from gpt2_accel.data.sources import part_size, reading, text_size
from gpt2_accel.files import first_line

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

SECONDS_TO_ANSWER = 8


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
            for table in self.stream.with_format("arrow").iter(batch_size=256):
                for value in table.to_pylist():
                    yield Row(value, RowNumber(self.name, number), number)
                    number += 1


def parquet_parts(files: Sequence[str], column: str, part_bytes: int) -> list[Stream]:
    """Divides local Parquet files into parts. Raises `ValueError` if one is damaged or lacks the `column`."""
    name = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
    builder = open_builder(name, "parquet", data_files={"train": list(files)})
    sizes = sizes_of(files)
    wanted = ceil(sum(map(text_size, files, sizes)) / part_bytes)
    return stream_parts(builder, name, "train", column, sizes, wanted)


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

    Raises `ValueError` if the data set, its configuration, split or column does not exist, `OSError` if the Hub cannot be
    reached.
    """
    revision = pinned_revision(name, revision)
    options = {"name": config, "revision": revision, "data_files": data_files}
    builder = open_builder(name, name, **{key: value for key, value in options.items() if value})
    files = (builder.config.data_files or {}).get(split)
    if not files:
        splits = ", ".join(map(str, builder.config.data_files or {})) or "none"
        raise ValueError(f"the data set {name} has no split {split!r}, only {splits}: set --split")
    sizes = sizes_of(files)
    if numbered:
        parts = stream_parts(builder, name, split, column, sizes, len(files))
        *first_rows, total = accumulate(rows_of(name, files), initial=0)
        return [
            replace(part, name=name, first_row=first, total_rows=total)
            for part, first in zip(parts, first_rows, strict=True)
        ], revision
    total = sum(map(text_size, files, sizes))
    wanted = ceil(total / part_size(total, shard_tokens))
    return stream_parts(builder, name, split, column, sizes, wanted), revision


def stream_parts(
    builder: "DatasetBuilder", name: str, split: str, column: str, sizes: list[int], wanted: int
) -> list[Stream]:
    """Returns about `wanted` parts of a split, fewer if its files cannot be divided.

    `sizes` are those of its files, in bytes. Raises `ValueError` if it cannot be read or lacks the `column`.
    """
    with reading(name):
        stream = builder.as_streaming_dataset(split)
    columns = stream.column_names
    if column and columns and column not in columns:
        raise ValueError(no_column(name, column, columns))
    if column and hasattr(builder.config, "columns"):  # Parquet reads no other column
        builder.config.columns = [column]
        stream = builder.as_streaming_dataset(split)
    with reading(name):
        if wanted > stream.num_shards:
            stream = stream.reshard()
    count = max(1, min(wanted, stream.num_shards))
    files = builder.config.data_files[split]
    state = repr((list(zip(files, sizes, map(modified, files), strict=True)), split, column))
    each = sum(map(text_size, files, sizes)) // count
    names = [f"{name}, part {i + 1} of {count}" if count > 1 else name for i in range(count)]
    return [Stream(names[i], state, stream.shard(count, i), each) for i in range(count)]


def sizes_of(files: Sequence[str]) -> list[int]:
    """Returns the sizes in bytes of local or remote files, 0 where unknown."""
    import fsspec

    def size(file: str) -> int:
        file_system, path = fsspec.core.url_to_fs(file.split("::")[-1])  # zip://NAME::ARCHIVE
        return file_system.info(path)["size"] or 0

    with reading(files[0]), ThreadPoolExecutor(16) as pool:
        return list(pool.map(size, files))


def modified(file: str) -> int:
    """Returns the modification time of a local file in ns, 0 for a remote one, which has a revision."""
    path = file.split("::")[-1]
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


def rows_of(name: str, files: Sequence[str]) -> list[int]:
    """Returns the numbers of rows of Parquet files. Raises `ValueError` for files of another format."""
    import fsspec
    import pyarrow.parquet

    def count(file: str) -> int:
        with fsspec.open(file, "rb") as opened:
            return pyarrow.parquet.read_metadata(opened).num_rows

    if not all(file.endswith(".parquet") for file in files):
        raise ValueError(
            f"the data set {name} is not stored as Parquet, so its rows have no numbers to draw "
            "validation rows from: choose a Parquet --revision, such as refs/convert/parquet"
        )
    with reading(name), ThreadPoolExecutor(16) as pool:
        return list(pool.map(count, files))


def open_builder(name: str, path: str, /, **options: Any) -> "DatasetBuilder":
    """Returns the `datasets` builder of a data set. Raises `ValueError`, with its `name`, if it cannot be opened."""
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(path, **options)
    except (ValueError, RuntimeError, OSError) as error:
        fix = "check its name, --config and --data_files, and the network"
        if "script" in str(error):
            fix = "try --revision refs/convert/parquet"
        raise ValueError(
            f"the data set {name} cannot be opened ({first_line(error)}): {fix}"
        ) from error


def pinned_revision(name: str, revision: str | None) -> str | None:
    """Resolves the `revision` of a data set to a commit; returns `revision` for a local folder or in offline mode.

    One request to the Hub, so that a wrong name or a missing network is reported within seconds, where `datasets` retries.

    Raises `ValueError` if the Hub has no such data set or revision that may be read, `OSError` if it cannot be reached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if os.path.exists(name) or constants.HF_HUB_OFFLINE:
        return revision
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=SECONDS_TO_ANSWER).sha
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"the Hub has no data set {name}{at} that you may read ({first_line(error)}): check the name and the revision, "
            "or log in with `hf auth login`"
        ) from error
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"the Hugging Face Hub cannot be reached ({first_line(error)}): connect to a network, or "
            "set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from error
