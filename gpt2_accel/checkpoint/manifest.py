"""Writes and verifies a checkpoint's manifest (size and SHA-256 of each file), and reads its `state.json`."""

import json
from contextlib import suppress
from pathlib import Path

from gpt2_accel.files import digest, parse_json

STATE = "training_state"
MANIFEST = f"{STATE}/manifest.json"


def find_corruption(checkpoint: Path, *, model_only: bool = False) -> str | None:
    """Describes the first damage of a checkpoint; None if all files match its manifest.

    With `model_only` the files of `training_state/` are not checked.
    """
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
        files = parse_json(text)["files"]
        intact = text == manifest_text(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        return "its manifest is missing or damaged"
    for name, entry in files.items():
        if not (model_only and name.startswith(f"{STATE}/")):
            try:
                if file_entry(checkpoint / name) != entry:
                    return f"{name} does not match its size or checksum"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
    return None


def write_manifest(checkpoint: Path) -> None:
    """Writes the manifest of a checkpoint whose other files are all written."""
    paths = [path for path in checkpoint.rglob("*") if path.is_file()]
    files = {path.relative_to(checkpoint).as_posix(): file_entry(path) for path in paths}
    (checkpoint / MANIFEST).write_text(manifest_text(files), encoding="utf-8")


def file_entry(path: Path) -> dict:
    """Returns the manifest's entry of a file."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def manifest_text(files: dict) -> str:
    """Formats a manifest. Any change of the file, even of its white space, counts as damage."""
    return json.dumps({"files": files}, indent=2, sort_keys=True) + "\n"


def read_state(checkpoint: Path) -> dict:
    """Reads a checkpoint's `state.json`. Raises `ValueError` if it is damaged."""
    path = checkpoint / STATE / "state.json"
    with suppress(OSError, ValueError):
        state = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.keys() >= {"step", "optimizer", "data", "position"}:
            return state
    raise ValueError(f"{path} is damaged or of release 0.1: resume from another checkpoint")
