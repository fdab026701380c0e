"""Writing folders and files so that a reader sees the old state or the new one, never a half."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends without an error.

    It is on disk before it gets its name. If the block raises, nothing is left behind; what a killed
    process left is removed by the next call for the same `path`.

    Raises `FileExistsError` if `path` is there already.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists already: remove it or choose another folder")
    with scratch_directory(path.with_name(f".{path.name}.partial")) as scratch:
        yield scratch
        sync_tree(scratch)
        scratch.rename(path)
        sync(path.parent)


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
