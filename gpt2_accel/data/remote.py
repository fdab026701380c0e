"""Shards that are elsewhere, such as on the Hub: pieces of their files, fetched ahead of need and cached on disk."""

import atexit
import itertools
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_accel.data.shards import UnreadableData, byte_range
from gpt2_accel.files import first_line, write_file

PIECE = 2**18  # bytes; a block of 64 windows of 1,024 tokens, 2 bytes each, is half of it
AT_ONCE = 16  # requests
LOOK = 256  # pieces between looks at the size of the cache

Fetch = Callable[[str, int, int], bytes]
"""`fetch(file, start, end)` returns the bytes [start, end) of a file, and tries again before it raises an error."""


class RemoteShards:
    """Reads the shards of a data set, whose files `fetch` reads, through a cache of pieces in `folder`.

    Processes of one machine share the folder: a piece is a file, written atomically. If all pieces have more than `limit`
    bytes, the oldest are removed. `share` (rank, ranks) says which pieces this process fetches ahead of need.
    """

    def __init__(
        self, folder: Path, fetch: Fetch, limit: float = 1e11, share: tuple[int, int] = (0, 1)
    ):
        self.folder, self.fetch, self.limit, self.share = folder, fetch, limit, share
        self._queued: set[tuple] = set()
        self._count = itertools.count(1)
        # Not an executor: at the process's end that would wait for hung requests.
        self._pool = ThreadPool(AT_ONCE)
        atexit.register(self._pool.terminate)

    def read(self, dtype: np.dtype, shard: dict, start: int, count: int) -> np.ndarray:
        """Returns the tokens [start, start + count) of a shard, (count,) of `dtype`; fetches the pieces that are missing.

        Raises `UnreadableData` if a piece cannot be fetched.
        """
        first, end, size = byte_range(dtype, shard, start, count)
        data = b""
        for number in pieces(first, end):
            part = slice(max(0, first - number * PIECE), end - number * PIECE)
            path, *place = self._piece(shard, number, size)
            try:
                with open(path, "rb") as file:
                    file.seek(part.start)
                    data += file.read(min(PIECE, part.stop) - part.start)
            except FileNotFoundError:
                data += self._download(path, *place)[part]
        return np.frombuffer(data, dtype)

    def fetch_ahead(self, dtype: np.dtype, shard: dict, start: int, count: int) -> None:
        """Begins to fetch the pieces that hold the tokens [start, start + count) of a shard."""
        rank, ranks = self.share
        first, end, size = byte_range(dtype, shard, start, count)
        for number in pieces(first, min(end, size)):
            task = self._piece(shard, number, size)
            if number % ranks == rank and task not in self._queued:
                self._queued.add(task)
                self._pool.apply_async(self._fetch_missing, task)

    def _piece(self, shard: dict, number: int, size: int) -> tuple[Path, str, int, int]:
        """Returns the path of a piece of a file of `size` bytes, and its place in that."""
        path = self.folder / f"{shard['file']}.pieces" / str(number)
        return path, shard["file"], number * PIECE, min(size, (number + 1) * PIECE)

    def _fetch_missing(self, path: Path, *place: Any) -> None:
        if not path.exists():  # an error ends only this task: `read` tries again, and raises it
            self._download(path, *place)

    def _download(self, path: Path, file: str, start: int, end: int) -> bytes:
        try:
            data = self.fetch(file, start, end)
            if len(data) != end - start:
                raise OSError(f"{len(data):,} of {end - start:,} bytes came")
            write_file(path, data)
        except Exception as error:  # the HTTP client's errors differ between its versions
            problem = first_line(error)
            raise UnreadableData(
                f"{file} cannot be fetched ({problem}): start the same command again later"
            ) from error
        if next(self._count) % LOOK == 0:
            self._evict()
        return data

    def _evict(self) -> None:
        """Removes the oldest pieces beyond the limit."""
        with suppress(FileNotFoundError):  # of a piece that another process has just removed
            written = self.folder.glob("*.pieces/[0-9]*")  # without those that are being written
            found = sorted(written, key=lambda path: path.stat().st_mtime)
            for path in found[: max(0, len(found) - int(self.limit // PIECE))]:
                path.unlink()
                self._queued.clear()


def pieces(first: int, end: int) -> range:
    """Returns the numbers of the pieces that hold the bytes [first, end) of a file."""
    return range(first // PIECE, -(-end // PIECE))
