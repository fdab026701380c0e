"""Shards that are elsewhere, such as on the Hub: pieces of their files, fetched ahead of need and
cached on disk.

The digest of a piece is the first 16 bytes of its SHA-256. A file `NAME.sums` beside the shard NAME
holds the size of a piece, as a little-endian integer of 16 bytes, and then the digests of all
pieces in order. The manifest has the SHA-256 of that file.
"""

import atexit
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from gpt2_accel.data.shards import UnreadableData, byte_range
from gpt2_accel.runtime.files import write_file

PIECE = 2**18  # bytes; a block of 64 windows of 1,024 tokens, 2 bytes each, is half of it
AT_ONCE = 16  # requests
LOOK = 256  # pieces between looks at the size of the cache
DIGEST = 16  # bytes
SUMS = ".sums"  # ends the name of a file of digests

Fetch = Callable[[str, int, int, int], bytes]
"""`fetch(file, start, end, size)` returns the bytes [start, end) of a file of `size` bytes, and
tries again before it raises an error."""


class RemoteShards:
    """Reads the shards of a data set, whose files `fetch` reads, through a cache of pieces in `folder`.

    Processes of one machine share the folder: a piece is a file that ends with its digest, written
    atomically. If all pieces have more than `limit` bytes, the oldest are removed. `share` (rank,
    ranks) says which pieces this process fetches ahead of need. `sums` has the SHA-256 (hex) of the
    `.sums` file of each shard; the content of a shard without one is not checked.
    """

    def __init__(
        self,
        folder: Path,
        fetch: Fetch,
        sums: Mapping[str, str],
        limit: float = 1e11,
        share: tuple[int, int] = (0, 1),
    ):
        self.folder, self.fetch, self.sums = folder, fetch, sums
        self.limit, self.share = limit, share
        self._sums = functools.cache(self._fetch_sums)  # 12 kB for 100 million tokens
        self._queued: set[tuple] = set()
        self._count = itertools.count(1)
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
        rank, ranks = self.share
        first, end, size = byte_range(dtype, shard, start, count)
        for number in pieces(first, end):
            piece = shard["file"], number, size
            if number % ranks == rank and piece not in self._queued:
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
        place = DIGEST * (number + 1)
        if file in self.sums and not self._sums(file, size).startswith(own, place):
            raise UnreadableData(
                f"{file} does not match {file}{SUMS} from byte {start:,} on: start the same command "
                "again, or push the data again"
            )
        write_file(path, data + own)
        if next(self._count) % LOOK == 0:
            self._evict()
        return data

    def _fetch_sums(self, file: str, size: int) -> bytes:
        """Returns the content of the `.sums` file of a shard of `size` bytes, after checking it."""
        name = f"{file}{SUMS}"
        length = DIGEST * (1 + len(pieces(0, size)))
        content = self.fetch(name, 0, length, length)
        if hashlib.sha256(content).hexdigest() != self.sums[file]:
            raise UnreadableData(
                f"{name} does not match the manifest: start the same command again, or push the data "
                "again"
            )
        return content

    def _evict(self) -> None:
        """Removes the oldest pieces beyond the limit."""
        with suppress(FileNotFoundError):  # another thread or process evicts at this moment
            written = self.folder.glob("*.pieces/[0-9]*")  # without those that are being written
            found = sorted(written, key=lambda path: path.stat().st_mtime)
            for path in found[: max(0, len(found) - int(self.limit // PIECE))]:
                path.unlink(missing_ok=True)
                self._queued.clear()


def pieces(first: int, end: int) -> range:
    """Returns the numbers of the pieces that hold the bytes [first, end) of a file."""
    return range(first // PIECE, -(-end // PIECE))


def digest(piece: bytes) -> bytes:
    """Returns the digest of a piece."""
    return hashlib.sha256(piece).digest()[:DIGEST]


def write_sums(shard: Path) -> str:
    """Writes the `.sums` file of a shard; returns its SHA-256, hex."""
    with open(shard, "rb") as file:
        digests = map(digest, iter(functools.partial(file.read, PIECE), b""))
        content = b"".join([PIECE.to_bytes(DIGEST, "little"), *digests])
    write_file(f"{shard}{SUMS}", content)
    return hashlib.sha256(content).hexdigest()
