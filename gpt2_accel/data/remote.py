"""Shards that are elsewhere, such as on the Hub: pieces of their files, fetched ahead of need and
cached on disk.

The digest of a piece is the first 16 bytes of its SHA-256. The manifest of pushed data has the
digests of all pieces of each shard, in order.
"""

import atexit
import functools
import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from gpt2_accel.data.shards import UnreadableData, byte_range
from gpt2_accel.runtime.files import write_file

PIECE = 2**18  # bytes; a block of 64 windows of 1,024 tokens, 2 bytes each, is half of it
AT_ONCE = 16  # requests
DIGEST = 16  # bytes

Fetch = Callable[[str, int, int, int], bytes]
"""`fetch(file, start, end, size)` returns the bytes [start, end) of a file of `size` bytes, and
tries again before it raises an error."""


@dataclass(eq=False)
class RemoteShards:
    """Reads the shards of a data set, whose files `fetch` reads, through a cache of pieces in `folder`.

    Processes of one machine share the folder: a piece is a file that ends with its digest, written
    atomically. `sums` has the `digests` of each shard; the content of a shard without them is not
    checked. Process `rank` of the `ranks` of a machine fetches its share of what is ahead of need.
    """

    folder: Path
    fetch: Fetch
    sums: Mapping[str, str]
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        self._queued: set[tuple] = set()
        # Not an executor: at the process's end that would wait for hung requests.
        self._pool = ThreadPool(AT_ONCE)
        atexit.register(self._pool.terminate)

    def read(self, dtype: np.dtype, shard: dict, start: int, count: int) -> np.ndarray:
        """Returns the tokens [start, start + count) of a shard, (count,) of `dtype`; fetches the pieces
        that are missing.

        Raises `UnreadableData` if a piece is not the one that was pushed, and the errors of `fetch`.
        """
        first, end, size = byte_range(dtype, shard, start, count)
        numbers = pieces(first, end)
        data = b"".join(self._piece(shard["file"], number, size) for number in numbers)
        skipped = numbers.start * PIECE
        return np.frombuffer(data[first - skipped : end - skipped], dtype)

    def fetch_ahead(self, dtype: np.dtype, shard: dict, start: int, count: int) -> None:
        """Begins to fetch the pieces that hold the tokens [start, start + count) of a shard."""
        first, end, size = byte_range(dtype, shard, start, count)
        for number in pieces(first, end):
            piece = shard["file"], number, size
            if number % self.ranks == self.rank and piece not in self._queued:
                self._queued.add(piece)
                self._pool.apply_async(self._piece, piece)  # `read` raises an error again

    def _piece(self, file: str, number: int, size: int) -> bytes:
        """Returns a piece of a file of `size` bytes; fetches it if the cache has no intact one."""
        path = self.folder / f"{file}.pieces" / str(number)
        with suppress(OSError):
            content = path.read_bytes()
            if content[-DIGEST:] == digest(content[:-DIGEST]):
                return content[:-DIGEST]
        start = number * PIECE
        data = self.fetch(file, start, min(size, start + PIECE), size)
        own = digest(data)
        listed = self.sums.get(file)
        if listed and not listed.startswith(own.hex(), 2 * DIGEST * number):
            raise UnreadableData(
                f"{file} does not match its digests from byte {start:,} on: start the same command "
                "again, or push the data again"
            )
        write_file(path, data + own)
        return data


def pieces(first: int, end: int) -> range:
    """Returns the numbers of the pieces that hold the bytes [first, end) of a file."""
    return range(first // PIECE, -(-end // PIECE))


def digest(piece: bytes) -> bytes:
    """Returns the digest of a piece."""
    return hashlib.sha256(piece).digest()[:DIGEST]


def digests(shard: Path) -> str:
    """Returns the digests of all pieces of a shard, hex, in one text."""
    found = ""
    with open(shard, "rb") as file:
        for piece in iter(functools.partial(file.read, PIECE), b""):
            found += digest(piece).hex()
    return found
