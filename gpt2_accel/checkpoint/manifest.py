"""The manifest of a checkpoint: sizes and SHA-256 of its files, and the check of its `state.json`."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt2_accel.files import digest, parse_json, plain_name

STATE = "training_state"
MANIFEST = f"{STATE}/manifest.json"


def find_corruption(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, None if each file is as its manifest says."""
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
        files = parse_json(text)["files"]
        if text != manifest_text(files) or not all(map(plain_name, files)):
            return "its manifest is damaged"
        checks = [
            (checkpoint / name, entry["bytes"], entry["sha256"]) for name, entry in files.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is missing or damaged"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return next(filter(None, pool.map(find_file_corruption, checks)), None)


def find_file_corruption(check: tuple[Path, int, str]) -> str | None:
    """What is wrong with one file: (path, its size, its SHA-256)."""
    path, size, sha256 = check
    try:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        return None if digest(path) == sha256 else f"{path.name} does not match its checksum"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def write_manifest(checkpoint: Path) -> None:
    """Writes down the size and checksum of each file of a checkpoint that is complete but for this."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    files = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": digest(path),
        }
        for path in paths
    }
    (checkpoint / MANIFEST).write_text(manifest_text(files), encoding="utf-8")


def manifest_text(files: dict) -> str:
    """The one way to write a manifest, so that any change of it shows."""
    return json.dumps({"files": files}, indent=2, sort_keys=True) + "\n"


def read_state(checkpoint: Path) -> dict:
    """A checkpoint's `state.json`; raises `ValueError` if that is not one of this release."""
    path = checkpoint / STATE / "state.json"
    kinds = {"step": int, "optimizer": str, "data": str, "guard": dict}
    kinds |= {"scaler": dict | None, "val_loss": float | None, "run_id": str | None}
    kinds |= {"position": dict | None}
    try:
        state = {
            "run_id": None,
            "position": None,
            **parse_json(path.read_text(encoding="utf-8")),
        }  # older: without
        wrong = [name for name, kind in kinds.items() if not isinstance(state[name], kind)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: resume from another checkpoint") from error
    if wrong or state["step"] < 0:
        raise ValueError(f"{path} is damaged: resume from another checkpoint")
    return state
