"""Reads a run's folder: its checkpoints, the newest weights, the checkpoint to resume, its status.

A manifest has the size and SHA-256 of files: all files of a checkpoint, or the weights,
`config.json` and `tokenizer.json` of a final model.
"""

import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpt2_accel.hf import hub
from gpt2_accel.runtime.files import digest, read_json, remove, scratch_path
from gpt2_accel.runtime.signals import is_first

STATE = "training_state"
CHECKPOINT_MANIFEST = f"{STATE}/manifest.json"
SILENCE = timedelta(minutes=3)  # a run whose last heartbeat is older counts as killed


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Returns the checkpoints of a run's folder, oldest first."""
    paths = Path(run_dir).glob("checkpoint-*")
    checkpoints = [p for p in paths if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(checkpoints, key=step_of)


def find_checkpoint(resume_from: str | None, run_dir: str | Path) -> Path | None:
    """Returns the checkpoint that `resume_from` names; None for a new run.

    `latest` is the newest intact checkpoint of `run_dir`; damaged ones are skipped and reported. A
    Hub id names the checkpoint that a run with `--hub_strategy checkpoint` pushed.

    Raises `FileNotFoundError` if the path is not a checkpoint, `ValueError` if it is damaged or too
    old or if `latest` finds only damaged ones, and `FileExistsError` if the run would
    overwrite a model or another run's checkpoints.
    """
    run_dir = Path(run_dir)
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints and any(run_dir.glob("model*.safetensors")):
        raise FileExistsError(
            f"{run_dir} holds a model but no checkpoint to continue, and a run would overwrite the "
            "model: choose another --output_dir"
        )
    if resume_from == "latest":
        path = None
        for checkpoint in reversed(checkpoints):
            problem = find_corruption(checkpoint)
            if problem is None:
                path = checkpoint
                break
            print(f"{checkpoint} is skipped: {problem}")
        if checkpoints and path is None:
            raise ValueError(
                f"all checkpoints in {run_dir} are damaged: choose another --output_dir for a new "
                "run"
            )
    else:
        path = None if resume_from is None else named_checkpoint(resume_from)
        if checkpoints and (path is None or path.resolve() != checkpoints[-1].resolve()):
            raise FileExistsError(
                f"{run_dir} holds {checkpoints[-1].name} of an earlier run, which would be "
                "overwritten: continue it with --resume_from latest, or choose another --output_dir"
            )
    if path is not None and "version" not in read_state(path):
        raise ValueError(
            f"{path} is older than release 0.6: resume it with release 0.6, or open it as a model "
            "by --init_from; release 0.5 resumes a run of 0.4"
        )
    return path


def named_checkpoint(name: str) -> Path:
    """Returns the checkpoint that a path or a Hub id names.

    Raises `FileNotFoundError` if it is not a checkpoint, `ValueError` if it is damaged.
    """
    path = Path(name)
    if not path.exists() and hub.is_repo_id(name):
        path = hub.download(name, [f"{hub.LAST_CHECKPOINT}/*"]) / hub.LAST_CHECKPOINT
    if not (path / STATE / "state.json").is_file():
        raise FileNotFoundError(
            f"--resume_from {name} is not a checkpoint of this toolkit: give latest, a Hub id that "
            "a run with --hub_strategy checkpoint pushed to, or a folder such as "
            "RUN/checkpoint-1000"
        )
    problem = find_corruption(path)
    if problem is not None:
        raise ValueError(f"{path} is damaged: {problem}; resume from another checkpoint")
    return path


def model_directory(name: str | Path) -> str | Path:
    """Returns the directory of a run's newest weights. Any other name is returned unchanged.

    It is the run's last checkpoint, or the run's folder if that has the final model, and the run is
    finished or has no `status.json`.
    """
    checkpoints = list_checkpoints(name)
    # A finished run that is continued keeps its old model until it is finished again.
    finished = read_status(Path(name)).get("state", "finished") == "finished"
    if not checkpoints or (finished and (Path(name) / "config.json").exists()):
        return name
    return checkpoints[-1]


def read_status(run_dir: Path) -> dict:
    """Reads a run's `status.json`; an empty dict if it is missing or damaged.

    A `running` state without a heartbeat for `SILENCE` becomes `killed`.
    """
    try:
        status = read_json(run_dir / "status.json")
        silent = datetime.now(UTC) - datetime.fromisoformat(status["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if status.get("state") == "running" and silent > SILENCE:
        status |= {"state": "killed", "reason": f"no heartbeat since {status['time']}"}
    return status


def verified_directory(name: str | Path, verify: bool = True) -> str | Path:
    """Returns `model_directory(name)`, after comparing its files with the manifest.

    The first process of a machine compares them, without the files of `training_state/`. Nothing is
    compared if `verify` is False or the directory has no manifest. Raises `ValueError` if a file
    does not match. A changed config or tokenizer of a final model, or a run that is not finished,
    is only reported on stderr.
    """
    directory = model_directory(name)
    path = Path(directory)
    if directory != name and is_first():
        print(f"{name} is not finished: this is {path.name}", file=sys.stderr)
    is_checkpoint = (path / STATE).is_dir()
    manifest = CHECKPOINT_MANIFEST if is_checkpoint else hub.MODEL_MANIFEST
    if verify and is_first() and (is_checkpoint or (path / manifest).is_file()):
        for file, problem in changed_files(path, manifest, model_only=True):
            if is_checkpoint or file.startswith("model"):
                raise ValueError(
                    f"{path} is damaged: {problem}; use another checkpoint or model, or --verify "
                    "false where the command has it"
                )
            print(f"{path} has changed: {problem}", file=sys.stderr)
    return directory


def step_of(checkpoint: Path) -> int:
    """Returns the number of updates in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def best_checkpoint(checkpoints: list[Path]) -> Path | None:
    """Returns the checkpoint with the lowest validation loss; None if none was evaluated."""
    best = None
    lowest = math.inf
    for path in checkpoints:
        with suppress(ValueError):  # damaged since it was written
            loss = read_state(path).get("val_loss")
            if loss is not None and loss < lowest:
                best = path
                lowest = loss
    return best


def point_to(name: str, target: Path) -> None:
    """Atomically makes `name` a symbolic link to `target`, in the same folder.

    Does nothing on file systems without symbolic links, such as buckets and Colab's Drive: the link
    is optional.
    """
    link = target.with_name(name)
    new = scratch_path(link)
    with suppress(OSError):
        new.symlink_to(target.name)
        new.replace(link)
    remove(new)


def find_corruption(checkpoint: Path) -> str | None:
    """Describes the first damage of a checkpoint; None if all files match its manifest."""
    return next((problem for _, problem in changed_files(checkpoint, CHECKPOINT_MANIFEST)), None)


def changed_files(
    folder: Path, manifest: str, model_only: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields the name of each file that does not match a manifest, and what differs.

    With `model_only` the files of `training_state/` are not checked.
    """
    try:
        files = read_json(folder / manifest)["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        yield manifest, "its manifest is missing or damaged"
        return
    for name, entry in files:
        if model_only and name.startswith(f"{STATE}/"):
            continue
        try:
            if file_entry(folder / name) != entry:
                yield name, f"{name} does not match its checksum in {manifest}"
        except OSError as error:
            yield name, f"{name} cannot be read ({error.strerror})"


def file_entry(path: Path) -> dict:
    """Returns the manifest's entry of a file."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def read_state(checkpoint: Path) -> dict:
    """Reads a checkpoint's `state.json`. Raises `ValueError` if it is damaged."""
    path = checkpoint / STATE / "state.json"
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: resume from another checkpoint, or start from its weights by "
            "--init_from"
        ) from error
