"""Atomic writes and the lock of a folder: a reader sees the old content or the new, never half of it.

Everything is written under a hidden temporary name, `.NAME.HOST.PID.NUMBER.partial` beside its place, synced to
disk and renamed. The name is unique: two processes that write the same file do not disturb each other. The
process in the name tells what a killed process left behind (`remove_leftovers`).
"""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

_numbers = itertools.count()

# Atomic writes


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yields a binary file that becomes `path` when the block ends without an error, in one step and after it is
    on disk. If the block raises, `path` stays as it was."""
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
    """Replaces the content of a file in one step, text as UTF-8. Creates its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: str | Path, value: object) -> None:
    """Writes `value` as indented JSON, in one step."""
    write_file(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def atomic_files(directory: str | Path) -> Iterator[Path]:
    """Yields an empty folder whose files replace those of `directory` when the block ends without an error, each
    in one step and after all of them are on disk."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with scratch_directory(directory / "files") as scratch:
        yield scratch
        sync_tree(scratch)
        for file in sorted(scratch.iterdir()):
            file.replace(directory / file.name)
        sync(directory)


@contextmanager
def atomic_directory(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends without an error, after it is on disk.

    If the block raises, nothing is left behind. What a killed process left is removed by the next call for the
    same `path`. Raises `FileExistsError` if `path` exists, unless it is to be replaced.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists already: remove it or choose another folder")
    remove_leftovers(path.parent, path.name)
    with scratch_directory(path) as scratch:
        yield scratch
        sync_tree(scratch)
        old = hide(path) if os.path.lexists(path) else None
        scratch.rename(path)
        sync(path.parent)
        if old is not None:
            remove(old)


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path`, which is gone afterwards, whatever happens."""
    scratch = scratch_path(path)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def discard(folder: Path) -> None:
    """Removes a folder so that a kill on the way leaves no half of it under its name; of a link to one, the link alone.

    Raises `OSError` if that fails. What it leaves then has a hidden name, which `remove_leftovers` knows.
    """
    hidden = hide(folder)
    if hidden.is_symlink():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)


def hide(path: Path) -> Path:
    """Gives a file or a folder a temporary name, and returns that."""
    hidden = scratch_path(path)
    path.rename(hidden)
    return hidden


def scratch_path(path: Path) -> Path:
    """A hidden name beside `path` that no other writer has: `.NAME.HOST.PID.NUMBER.partial`."""
    unique = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
    return path.with_name(f".{path.name}.{unique}.partial")


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Removes the temporary files and folders in `folder`, of the target `name`, whose process on this machine has
    ended."""
    host = socket.gethostname()
    name = name if name == "*" else glob.escape(name)
    for path in folder.glob(f".{name}.{glob.escape(host)}.*.partial"):
        with suppress(ValueError):
            if not psutil.pid_exists(int(path.name.split(".")[-3])):
                remove(path)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, as far as it can be removed; does nothing if it is gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Waits until everything below `folder` is on disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The lock of a folder


@contextmanager
def lock_folder(folder: str | Path, hint: str = "choose another --output_dir") -> Iterator[None]:
    """Locks `folder`, which is created if need be, for this process; the system releases the lock if it dies.

    Removes what killed processes left there half-written. On a file system without locks (Lustre without `flock`) only
    a holder on this machine is noticed, by its name in the lock file. Raises `OSError` if another process holds the
    lock, or if nothing can be written there; `hint` ends the sentence.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"{folder} is no folder that can be written to ({error.strerror}): {hint}"
        ) from error
    with file:
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
            raise OSError(
                f"{folder} is in use by {holder or 'another run'}: wait for it to end, or {hint}"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        remove_leftovers(folder)
        yield


def is_running(holder: str) -> bool:
    """Whether the holder that a lock file names, `process PID on HOST`, is another process running on this machine."""
    words = holder.split()
    if len(words) != 4 or words[3] != socket.gethostname() or not words[1].isdigit():
        return False
    return int(words[1]) != os.getpid() and psutil.pid_exists(int(words[1]))


# Checks


def digest(path: Path) -> str:
    """The SHA-256 of a file, hex."""
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


# JSON


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError` if it is none, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class JsonLines:
    """An append-only log: one JSON object with a `step` per line, each line written at once.

    Opening it drops the lines of steps after `last_step`, which a resumed run writes again, and a line that a
    crash cut short.
    """

    def __init__(self, path: str | Path, last_step: int):
        kept = [entry for entry in read_json_lines(path) if entry["step"] <= last_step]
        write_file(path, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._file = open(path, "ab", buffering=0)
        self._unwritten = b""

    def write(self, entry: dict) -> None:
        """Appends one entry, with null for numbers that are not finite; on a full disk it waits in memory for the
        next."""
        entry = {name: None if not_finite(value) else value for name, value in entry.items()}
        self._unwritten += json.dumps(entry, allow_nan=False).encode() + b"\n"
        with suppress(OSError):
            written = self._file.write(self._unwritten)
            self._unwritten = self._unwritten[written:]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def not_finite(value: object) -> bool:
    """Whether a value is a float that JSON does not have."""
    return isinstance(value, float) and not math.isfinite(value)


def read_json_lines(path: str | Path) -> list[dict]:
    """The entries of a `JsonLines` file, none if it does not exist; leaves out a line that a crash cut short or
    damaged."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    return [entry for line in lines if (entry := read_json_line(line)) is not None]


def read_json_line(line: str) -> dict | None:
    """One line of a `JsonLines` file, None if it is not a complete one."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
