"""Atomic writes, locks, checksums, sizes, times and numbers as text, JSON lines, error messages.

A reader of a file sees the old content or the new, never a part. Files are written under a hidden
temporary name beside the target, `.NAME.HOST.PID.NUMBER.partial`, synced to disk and renamed. The
name is unique, so two processes can write the same file. The process id in the name identifies
leftovers of killed processes (`remove_leftovers`).
"""

import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

# Imported where they are used, since a recipe's --help does not need them: filelock, psutil, tqdm.

LOCK = ".lock"  # the name of a lock file
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"

_numbers = itertools.count()

# Atomic writes


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yields a binary file that atomically replaces `path` when the block ends, synced to disk.

    If the block raises, `path` is unchanged.
    """
    scratch = scratch_path(Path(path))
    try:
        with disk_errors(scratch, path):
            with open(scratch, "xb") as file:
                yield file
            sync(scratch)
            scratch.replace(path)
    finally:
        remove(scratch)


def write_file(path: str | Path, content: str | bytes) -> None:
    """Replaces the content of a file atomically, text as UTF-8. Creates its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: str | Path, value: object) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_file(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def atomic_files(directory: str | Path) -> Iterator[Path]:
    """Yields an empty folder whose files replace the files of `directory` when the block ends.

    Each file is replaced atomically, after all are synced to disk; none if the block raises. The
    order is that of the alphabet, reversed: `model.safetensors` is there before `config.json`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with scratch_directory(directory / "files") as scratch, disk_errors(scratch, directory):
        yield scratch
        sync_tree(scratch)
        for file in sorted(scratch.iterdir(), reverse=True):
            file.replace(directory / file.name)
        sync(directory)


@contextmanager
def atomic_directory(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends, synced to disk.

    If the block or the replacement raises, `path` is unchanged. Without `replace` it raises
    `FileExistsError` if `path` is not an unused folder.
    """
    if not replace:
        check_unused(path)
    path = Path(path).resolve()  # a link leads to the folder
    with scratch_directory(path) as scratch, disk_errors(scratch, path):
        yield scratch
        sync_tree(scratch)
        old = hide(path) if path.exists() else None
        try:
            scratch.rename(path)
        except BaseException:
            if old is not None:
                old.rename(path)
            raise
        sync(path.parent)
        if old is not None:
            remove(old)


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path`, and removes it at the end.

    First removes the folders that killed processes left.
    """
    remove_leftovers(path.parent)
    scratch = scratch_path(path)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        remove(scratch)


@contextmanager
def disk_errors(scratch: Path, path: str | Path) -> Iterator[None]:
    """Reports a disk error of the block with `path`, or a file in it, instead of `scratch`.

    A full disk raises an `OSError` without a file name; safetensors and tokenizers raise another
    type with the system's error in its text. Both become an `OSError` with a name.
    """
    try:
        yield
    except Exception as error:
        if "(os error " in str(error):
            raise OSError(f"{path}: {error}") from error
        if isinstance(error, OSError) and error.errno:
            name = str(error.filename or scratch)
            error.filename = name.replace(str(scratch), str(path))
        raise


def hide(path: Path) -> Path:
    """Renames a file or folder to a temporary name, and returns that."""
    return path.rename(scratch_path(path))


def scratch_path(path: Path) -> Path:
    """Returns a unique hidden name beside `path`: `.NAME.HOST.PID.NUMBER.partial`."""
    unique = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
    return path.with_name(f".{path.name}.{unique}.partial")


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files and folders in `folder` whose processes, on this host, have ended."""
    from psutil import pid_exists

    for path in folder.glob(f".*.{socket.gethostname()}.*.partial"):
        with suppress(ValueError):
            if not pid_exists(int(path.name.split(".")[-3])):
                remove(path)


def remove(path: Path) -> None:
    """Removes a file, link or folder as completely as possible; ignores what does not exist."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # a folder, or its rest
        path.unlink()


def sync_tree(folder: Path) -> None:
    """Syncs a folder and everything below it to disk.

    Gives files the mode of the umask, as the folder has: safetensors writes for the owner only.
    """
    mode = folder.stat().st_mode & 0o666
    for path in (folder, *folder.rglob("*")):
        if path.is_file():
            with suppress(OSError):  # mounted buckets have no modes
                path.chmod(mode)
        sync(path)


def sync(path: Path) -> None:
    """Syncs a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The lock of a folder


@contextmanager
def lock_folder(folder: str | Path, wait: float = 0.0) -> Iterator[None]:
    """Locks an output folder for this process, and creates it if it does not exist.

    The lock ends with the block, or the process. Waits up to `wait` seconds for another process
    that holds it. Removes partial files of killed processes. If the block raises, removes folders
    that this call created and that hold nothing else.

    Raises `OSError` if another process holds the lock or the folder cannot be written.
    """
    from filelock import FileLock, SoftFileLock, Timeout

    folder = Path(folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    kind = FileLock
    try:
        with TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno == errno.ENOLCK:  # NFS without lockd
            kind = SoftFileLock
    lock = kind(folder / LOCK, poll_interval=0.5)
    try:
        with suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            if wait:
                print(f"{folder} is in use by another process: waiting for it", flush=True)
            lock.acquire(timeout=wait)
    except Timeout as error:
        text = (
            f"{folder} is in use by another process: wait for it to end, or choose another "
            "--output_dir"
        )
        if isinstance(lock, SoftFileLock):  # without flock: filelock frees those of this host only
            text += f"; if the process and host in {folder / LOCK} are gone, delete that file"
        raise OSError(text) from error
    held = lock_id(folder)
    try:
        remove_leftovers(folder)
        yield
    except BaseException:
        with suppress(OSError):
            still_held = lock_id(folder) == held  # False: another process locks a new folder
            if created and still_held and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                for path in created:
                    path.rmdir()
        raise
    finally:
        lock.release()


def lock_id(folder: Path) -> int | None:
    """Returns the inode of a folder's lock file; 0 if there is none, None if the disk fails.

    It changes if another process locks a new folder under the same name.
    """
    try:
        return (folder / LOCK).stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError:
        return None


# Checks


def check_unused(folder: str | Path) -> None:
    """Raises `FileExistsError` if `folder` is not empty, is a file or is the working directory."""
    folder = Path(folder)
    if folder == Path() or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already: choose another folder")


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_pointer(path: str | Path) -> None:
    """Raises `ValueError` if a local file is a pointer of git-lfs, as in a clone without it."""
    if Path(path).is_file():
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{path} is a pointer of git-lfs instead of the file itself: run `git lfs "
                    "install` and `git lfs pull` in its folder, or download the file"
                )


def readable_size(size: float) -> str:
    """Formats a size in bytes with three digits: 850kB, 3.40MB, 12.0GB (1e9 bytes)."""
    from tqdm import tqdm

    return tqdm.format_sizeof(size, "B")


def duration(seconds: float) -> str:
    """Formats a duration: 0:02:18, or 4 days, 7:00:00."""
    return str(timedelta(seconds=round(seconds)))


# JSON


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises `ValueError` if it is damaged or nested too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises `ValueError` as `parse_json`."""
    return parse_json(path.read_bytes())


class JsonLines:
    """An append-only log: one JSON object with a `step` per line, written immediately.

    Opening it drops the lines of steps after `last_step`, which a resumed run rewrites, and an
    incomplete last line. `entries` are the lines that stay.
    """

    def __init__(self, path: Path, last_step: int):
        self.path = path
        self.entries = [entry for entry in read_json_lines(path) if entry["step"] <= last_step]
        self._open()

    def _open(self) -> None:
        write_file(self.path, "".join(json.dumps(entry) + "\n" for entry in self.entries))
        self._file = open(self.path, "ab", buffering=2**20)

    def write(self, entry: dict, extend: bool = False) -> None:
        """Appends an entry, with null for numbers that are not finite.

        With `extend` the values go to the last of `entries` if that is of the same step. If the
        disk is full, the line stays in the buffer.
        """
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in entry.items()
        }
        if extend and self.entries and self.entries[-1]["step"] == entry["step"]:
            self._file.close()
            self.entries[-1] |= finite
            self._open()
            return
        with suppress(OSError):
            self._file.write(json.dumps(finite).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file. Prints that it lacks lines if the disk is still full."""
        try:
            self._file.close()
        except OSError as error:
            print(f"{self._file.name} lacks its last lines: {sentence(error)}", file=sys.stderr)


def read_json_lines(path: Path) -> list[dict]:
    """Returns the undamaged entries of a `JsonLines` file; an empty list if the file is missing."""
    entries = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # incomplete
                entry = parse_json(line)
                if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                    entries.append(entry)
    return entries


# Errors


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def sentence(error: BaseException) -> str:
    """Returns the message of an error on one line; an `OSError` of the system as `FILE: reason`."""
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename2 or error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
