"""Writing folders and files so that a reader sees the old state or the new one, never a half."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def atomic_directory(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends without an error.

    It is on disk before it gets its name. If the block raises, nothing is left behind; what a killed
    process left is removed by the next call for the same `path`.

    Raises `FileExistsError` if `path` is there already, unless it is to be replaced.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists already: remove it or choose another folder")
    with scratch_directory(path.with_name(f".{path.name}.partial")) as scratch:
        yield scratch
        sync_tree(scratch)
        if path.exists():
            discard(path)
        scratch.rename(path)
        sync(path.parent)


def discard(folder: Path) -> None:
    """Removes a folder so that a kill on the way leaves no half of it under its name."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


@contextmanager
def exclusive(folder: str | Path, mend: str = "choose another --output_dir") -> Iterator[None]:
    """Holds `folder`, made if need be, for this process alone; the system lets go of it if that dies.

    Raises `OSError` if another process holds it; `mend` ends the sentence.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise OSError(
                    f"{folder} is in use by {file.read() or 'another run'}: wait for it to end, or {mend}"
                ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


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


@contextmanager
def atomic_files(directory: str | Path) -> Iterator[Path]:
    """Yields an empty folder whose files replace those of `directory` when the block ends without an
    error, each in one step and after it is on disk."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with scratch_directory(directory / ".partial") as scratch:
        yield scratch
        sync_tree(scratch)
        for file in sorted(scratch.iterdir()):
            file.replace(directory / file.name)
        sync(directory)


def replace_file(path: Path, data: bytes) -> None:
    """Makes `data` the content of a file in one step, also beside other processes that write there."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_bytes(data)
    sync(scratch)
    scratch.replace(path)


def write_json(path: str | Path, value: object) -> None:
    """Writes `value` as JSON to `path`, replacing what is there in one step."""
    path = Path(path)
    with atomic_files(path.parent) as folder:
        (folder / path.name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yields `path` as an empty folder, which is gone afterwards, whatever happens."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Waits until all below `folder` is on disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows does not open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
