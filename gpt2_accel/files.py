"""Atomic writes, folder locks, checksums, JSON lines, messages of errors. A reader sees the old content or the new, never a part.

Files are written under a hidden temporary name beside the target, `.NAME.HOST.PID.NUMBER.partial`, synced to disk and
renamed. The name is unique, so two processes can write the same file. The process in the name identifies what a killed
process left behind (`remove_leftovers`).
"""

import errno
import fcntl
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import psutil

LOCK = ".lock"  # the name of a lock file

_numbers = itertools.count()

# Atomic writes


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yields a binary file that atomically replaces `path` when the block ends, after a sync to disk. If the block
    raises, `path` is unchanged."""
    scratch = scratch_path(Path(path))
    try:
        with open(scratch, "xb", 2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


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
    """Yields an empty folder whose files replace those of `directory` when the block ends without an error, each
    atomically, after all are synced to disk. The last in the alphabet is replaced first, so that a `config.json` never
    lacks its `model.safetensors`, nor an ONNX file its `.data`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with scratch_directory(directory / "files") as scratch:
        yield scratch
        sync_tree(scratch)
        for file in sorted(scratch.iterdir(), reverse=True):
            file.replace(directory / file.name)
        sync(directory)


@contextmanager
def atomic_directory(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends without an error, after it is synced to disk.

    If the block or the replacement raises, `path` is unchanged. Without `replace` it raises the errors of
    `check_unused`.
    """
    if not replace:
        check_unused(path)
    path = Path(path).resolve()  # a link leads to the folder
    with scratch_directory(path) as scratch:
        yield scratch
        sync_tree(scratch)
        old = hide(path) if replace and path.exists() else None
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
    """Yields an empty folder beside `path`, and removes it at the end. First removes those that killed processes left."""
    remove_leftovers(path.parent, path.name)
    scratch = scratch_path(path)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def discard(folder: Path) -> None:
    """Removes a folder, or a link to one, so that a kill leaves no part of it under its name.

    Raises `OSError` if that fails. The remainder then has a hidden name, which `remove_leftovers` removes later.
    """
    hidden = hide(folder)
    if hidden.is_symlink():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)


def hide(path: Path) -> Path:
    """Renames a file or folder to a temporary name, and returns that."""
    hidden = scratch_path(path)
    path.rename(hidden)
    return hidden


def scratch_path(path: Path) -> Path:
    """Returns a unique hidden name beside `path`: `.NAME.HOST.PID.NUMBER.partial`."""
    unique = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
    return path.with_name(f".{path.name}.{unique}.partial")


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Removes temporary files and folders of the target `name` in `folder` whose process on this machine has ended."""
    host = socket.gethostname()
    name = name if name == "*" else glob.escape(name)
    for path in folder.glob(f".{name}.{glob.escape(host)}.*.partial"):
        with suppress(ValueError):
            if not psutil.pid_exists(int(path.name.split(".")[-3])):
                remove(path)


def remove(path: Path) -> None:
    """Removes a file, link or folder as far as possible; ignores what does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Syncs everything below `folder` to disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Syncs a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The lock of a folder


@contextmanager
def lock_folder(
    folder: str | Path, hint: str = "choose another --output_dir", *, wait: float = 0.0
) -> Iterator[None]:
    """Locks `folder` for this process, and creates it if it does not exist. The system releases the lock if the process
    dies.

    Waits up to `wait` seconds for another process that holds the lock. Removes partial files of killed processes. If
    the block raises, removes a folder that this call created and that holds nothing else. On a file system without
    locks (Lustre without `flock`) only a holder on this machine is noticed, by its name in the lock file.

    Raises `OSError`, with `hint` at its end, if another process holds the lock or the folder is not writable.
    """
    folder = Path(folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with wait_for_lock(folder, hint, wait):
        try:
            remove_leftovers(folder)
            yield
        except BaseException:
            if created and {path.name for path in folder.glob("*")} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                for path in created:
                    with suppress(OSError):  # not empty, or removed by the caller
                        path.rmdir()
            raise


def wait_for_lock(folder: Path, hint: str, seconds: float) -> TextIO:
    """Returns the locked lock file of `folder`. Tries for `seconds`; raises the errors of `lock_folder`."""
    ends = time.monotonic() + seconds
    waits = False
    while True:
        try:
            return take_lock(folder, hint)
        except BlockingIOError as error:
            if time.monotonic() >= ends:
                raise
            if not waits:
                in_use = first_line(error).partition(": ")[0]
                print(f"{in_use}: waiting up to {seconds:.0f} seconds for it to end", flush=True)
            waits = True
            time.sleep(0.5)


def take_lock(folder: Path, hint: str) -> TextIO:
    """Returns the locked lock file of `folder`. Raises `BlockingIOError` if another process holds the lock, and the
    other errors of `lock_folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"{folder} is no folder that can be written to ({error.strerror}): {hint}"
        ) from error
    file.seek(0)
    holder = file.read()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = False
    except BlockingIOError:
        held = True
    except OSError:
        held = is_running(holder)
        print(f"{folder} has no file locks: let no other run write there", file=sys.stderr)
    if held:
        file.close()
        raise BlockingIOError(
            f"{folder} is in use by {holder or 'another run'}: wait for it to end, or {hint}"
        )
    if not os.fstat(file.fileno()).st_nlink:  # the last holder removed it after it was opened here
        file.close()
        return take_lock(folder, hint)
    file.truncate(0)
    file.write(own_name())
    file.flush()
    return file


def lock_holder(folder: Path) -> str:
    """Returns the name in a folder's lock file, `process PID on HOST`; empty if there is none."""
    try:
        return (folder / LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""


def own_name() -> str:
    """Returns the name of this process in a lock file."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_running(holder: str) -> bool:
    """Whether the holder named in a lock file, `process PID on HOST`, is another running process of this machine."""
    words = holder.split()
    if len(words) != 4 or words[3] != socket.gethostname() or not words[1].isdigit():
        return False
    return int(words[1]) != os.getpid() and psutil.pid_exists(int(words[1]))


# Checks


def check_unused(folder: str | Path) -> None:
    """Raises `FileExistsError` if an output folder holds something or is a file, `NotADirectoryError` if it is below a
    file, `ValueError` if its path is empty or "."."""
    if Path(folder) == Path():  # the working directory cannot be replaced
        raise ValueError(
            f"output_dir is {str(folder)!r}, which is no folder: give the path of a new one"
        )
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already: remove it or choose another folder")
    if file := next((parent for parent in folder.parents if parent.is_file()), None):
        raise NotADirectoryError(
            f"{folder} is below {file}, which is a file: choose another folder"
        )


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_name(name: object) -> bool:
    """Whether `name` is a relative path that stays below its folder."""
    return (
        isinstance(name, str)
        and name != ""
        and not Path(name).is_absolute()
        and ".." not in Path(name).parts
    )


def readable_size(size: float) -> str:
    """Formats a size in bytes with two digits or more: 850 kB, 3.4 MB, 12 GB (1e9 bytes)."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.95 * unit:
            return f"{size / unit:.{size < 9.5 * unit:d}f} {name}"
    return f"{size:.0f} bytes"


# JSON


def parse_json(text: str) -> Any:
    """Parses JSON. Raises `ValueError` also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class JsonLines:
    """An append-only log with one JSON object, with a `step`, per line; each line is written immediately.

    Opening it drops the lines of steps after `last_step`, which a resumed run rewrites, and an incomplete last line.
    """

    def __init__(self, path: str | Path, last_step: int):
        kept = [entry for entry in read_json_lines(path) if entry["step"] <= last_step]
        write_file(path, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._file = open(path, "ab", buffering=0)
        self._unwritten = b""

    def write(self, entry: dict) -> None:
        """Appends one entry, with null for numbers that are not finite. On a full disk it stays in memory until the
        next call."""
        entry = {name: None if not_finite(value) else value for name, value in entry.items()}
        self._unwritten += json.dumps(entry, allow_nan=False).encode() + b"\n"
        with suppress(OSError):
            written = self._file.write(self._unwritten)
            self._unwritten = self._unwritten[written:]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def not_finite(value: object) -> bool:
    """Whether a value is an infinite or NaN float, which JSON lacks."""
    return isinstance(value, float) and not math.isfinite(value)


def read_json_lines(path: str | Path) -> list[dict]:
    """Returns the entries of a `JsonLines` file, without damaged lines; none if the file does not exist."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    return [entry for line in lines if (entry := read_json_line(line)) is not None]


def read_json_line(line: str) -> dict | None:
    """Parses one line of a `JsonLines` file; None if it is incomplete."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


# Errors


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def sentence(error: BaseException) -> str:
    """Returns the message of an error on one line; an `OSError` of the system as `FILE: reason`, without `FILE` if it
    names none."""
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename2 or error.filename}: " if error.filename is not None else ""
        full = ": free disk space and start again" if error.errno == errno.ENOSPC else ""
        return f"{place}{error.strerror}{full}"
    return " ".join(str(error).split()) or type(error).__name__
