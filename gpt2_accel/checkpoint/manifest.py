"""Writes and verifies a checkpoint's manifest (size and SHA-256 of each file), and reads its `state.json`."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt2_accel.files import digest, parse_json, plain_name

STATE = "training_state"
MANIFEST = f"{STATE}/manifest.json"


def find_corruption(checkpoint: Path, *, model_only: bool = False) -> str | None:
    """Describes the first damage of a checkpoint; None if all files match its manifest.

    A name `checkpoint-N` of another update counts as damage. With `model_only` the files of `training_state/` are not
    checked.
    """
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
        files = parse_json(text)["files"]
        if text != manifest_text(files) or not all(map(plain_name, files)):
            return "its manifest is damaged"
        checks = [
            (checkpoint / name, entry["bytes"], entry["sha256"])
            for name, entry in files.items()
            if not (model_only and name.startswith(f"{STATE}/"))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is missing or damaged"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if problem := next(filter(None, pool.map(find_file_corruption, checks)), None):
            return problem
    if re.fullmatch(r"checkpoint-\d+", checkpoint.name):
        try:
            step = read_state(checkpoint)["step"]
        except ValueError:  # found by its checksum, unless only the model is checked
            return None
        if checkpoint.name != f"checkpoint-{step}":
            return f"it holds update {step}, its name says another"
    return None


def find_file_corruption(check: tuple[Path, int, str]) -> str | None:
    """Describes the damage of one file; None if it is intact. `check`: path, size in bytes, SHA-256."""
    path, size, sha256 = check
    try:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        return None if digest(path) == sha256 else f"{path.name} does not match its checksum"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def write_manifest(checkpoint: Path) -> None:
    """Writes the manifest of a checkpoint whose other files are all written."""
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
    """Formats a manifest. Any change of the file, even of its white space, counts as damage."""
    return json.dumps({"files": files}, indent=2, sort_keys=True) + "\n"


def read_state(checkpoint: Path) -> dict:
    """Reads a checkpoint's `state.json`. Raises `ValueError` if it is damaged."""
    path = checkpoint / STATE / "state.json"
    kinds = {"step": int, "optimizer": str, "data": str, "guard": dict}
    kinds |= {"scaler": dict | None, "val_loss": float | None, "run_id": str | None}
    kinds |= {"position": dict | None}
    older = {"run_id": None, "position": None}  # release 0.1 has neither
    try:
        state = older | parse_json(path.read_text(encoding="utf-8"))
        wrong = [name for name, kind in kinds.items() if not isinstance(state[name], kind)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: resume from another checkpoint") from error
    if wrong or state["step"] < 0:
        raise ValueError(f"{path} is damaged: resume from another checkpoint")
    return state
