"""Pieces of a data set on the Hugging Face Hub, or in a folder that `datasets` can load.

Parquet files, the format of most data sets, are read by row groups: all cores work on one file, and rows have
numbers. Other formats are streamed by `datasets`, one file at a time.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from gpt2_accel.data.documents import (
    ByHash,
    HeldOut,
    Piece,
    piece_size,
)
from gpt2_accel.data.sources import Row, RowPiece, open_parquet, parquet_pieces, reading
from gpt2_accel.files import first_line

SECONDS_TO_ANSWER = 8
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")


@dataclass(frozen=True)
class StreamPiece(RowPiece):
    """One file of a data set that is not Parquet, streamed by `datasets`.

    `options` are the arguments of `datasets.load_dataset`.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    number: int
    count: int
    column: str
    is_held_out: HeldOut
    size: int = 0

    def rows(self) -> Iterator[Row]:
        for number, row in enumerate(self.values()):
            place = f"the data set {self.name}, row {number:,} of its file {self.number + 1}"
            yield Row(f"{self.number}:{number}", row, place)

    def values(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of the file."""
        from datasets import load_dataset

        with reading(self.name if os.path.exists(self.name) else f"hf://{self.name}"):
            stream = load_dataset(self.name, streaming=True, **dict(self.options))
            yield from stream.shard(num_shards=self.count, index=self.number)


@dataclass(frozen=True)
class LocalStreamPiece(StreamPiece):
    """A `StreamPiece` of local files, which have no revision.

    `modified` is the sum of their modification times in ns: the piece's `repr`, which plans hash, changes with a file.
    """

    modified: int = 0


def hub_pieces(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    revision: str | None = None,
    data_files: str | None = None,
    hold_out: Callable[[int], HeldOut] | None = None,
    piece_bytes: int | None = None,
) -> tuple[list[Piece], str | None]:
    """Returns the pieces of a data set, and its revision (a commit).

    Pieces of Parquet files have `piece_bytes`, by default `piece_size` of the data set. `hold_out` maps the number of rows to the rule that holds rows out for validation; by default one row in 20.

    Raises `ValueError` if the data set, its configuration, split or column does not exist, or if `hold_out` is given
    for a data set that is not Parquet; `OSError` if the Hub cannot be reached.
    """
    revision = pinned_revision(name, revision)
    options = {"name": config, "revision": revision, "data_files": data_files}
    options = {key: value for key, value in options.items() if value is not None}
    builder = open_builder(name, options)
    files = (builder.config.data_files or {}).get(split)
    if not files:
        splits = ", ".join(map(str, builder.config.data_files or {})) or "none"
        raise ValueError(f"the data set {name} has no split {split!r}, only {splits}: set --split")
    if ".parquet." in type(builder).__module__:
        return row_group_pieces(files, column, hold_out, piece_bytes), revision
    if hold_out is not None:
        raise ValueError(
            f"the data set {name} is not stored as Parquet, so its rows have no numbers to draw "
            "validation rows from: choose a Parquet --revision, such as refs/convert/parquet"
        )
    count = builder.as_streaming_dataset(split).num_shards
    pinned = tuple({**options, "split": split}.items())
    pieces = [StreamPiece(name, pinned, i, count, column, ByHash()) for i in range(count)]
    # A few formats, such as images with a file of captions, do not have one shard per file.
    shares = [[file] for file in files] if len(files) == count else [files] * count
    return [with_state(piece, share) for piece, share in zip(pieces, shares, strict=True)], revision


def with_state(piece: StreamPiece, files: list[str]) -> StreamPiece:
    """Returns the piece with the size and the modification time of its `files`, unchanged if they are not local."""
    paths = [Path(file.split("::")[-1]) for file in files]  # zip://NAME::ARCHIVE
    if not all(path.exists() for path in paths):
        return piece
    stats = [path.stat() for path in paths]
    size = sum(
        info.st_size * (3 if path.suffix in COMPRESSED else 1)
        for path, info in zip(paths, stats, strict=True)
    )
    modified = sum(info.st_mtime_ns for info in stats)
    return LocalStreamPiece(**{**vars(piece), "size": size}, modified=modified)


def row_group_pieces(
    urls: list[str],
    column: str,
    hold_out: Callable[[int], HeldOut] | None,
    piece_bytes: int | None,
) -> list[Piece]:
    """Returns the pieces of Parquet files; the rows are numbered over all files."""

    def count(url: str) -> tuple[int, int]:  # rows, bytes
        with open_parquet(url) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            return file.metadata.num_rows, sum(group.total_byte_size for group in groups)

    with ThreadPoolExecutor(16) as pool:  # one or two requests for each file
        rows, sizes = zip(*pool.map(count, urls), strict=True)
        each = piece_bytes or piece_size(sum(sizes))
        is_held_out = hold_out(sum(rows)) if hold_out else ByHash()
        first_rows = accumulate(rows, initial=0)
        rest = {"column": column, "name": "", "is_held_out": is_held_out, "piece_bytes": each}
        found = pool.map(
            lambda url, row: parquet_pieces(url, first_row=row, **rest), urls, first_rows
        )
        return list(chain.from_iterable(found))


def open_builder(name: str, options: dict[str, Any]):
    """Returns the `datasets` builder of a data set. Raises `ValueError` if it cannot be opened."""
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(name, **options)
    except (ValueError, RuntimeError, OSError) as error:
        fix = "check its name, --config and --data_files, and the network"
        if "script" in str(error):
            fix = "try --revision refs/convert/parquet"
        raise ValueError(
            f"the data set {name} cannot be opened ({first_line(error)}): {fix}"
        ) from error


def pinned_revision(name: str, revision: str | None) -> str | None:
    """Resolves the `revision` of a data set to a commit; returns `revision` for a local folder or in offline mode.

    One request to the Hub, so that a wrong name or a missing network is reported within seconds. Offline mode is
    `HF_HUB_OFFLINE`.

    Raises `ValueError` if the data set or its revision does not exist or may not be read, `OSError` if the Hub cannot
    be reached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    if os.path.exists(name) or constants.HF_HUB_OFFLINE:
        return revision
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=SECONDS_TO_ANSWER).sha
    except RevisionNotFoundError as error:
        raise ValueError(
            f"the data set {name} has no revision {revision!r}: choose one of those on its page"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403, 404):
            raise ValueError(
                f"the Hub has no data set {name} that you may read: check the name, or log in with "
                "`hf auth login`"
            ) from error
        raise OSError(f"the Hub answers HTTP {status} for {name}: try again later") from error
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"the Hugging Face Hub cannot be reached ({type(error).__name__}): connect to a network, or "
            "set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from error
