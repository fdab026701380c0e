"""Reads a run's folder: its checkpoints, the newest weights, the checkpoint to resume, its status."""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpt2_accel.checkpoint.manifest import STATE, find_corruption, read_state
from gpt2_accel.files import parse_json, remove, scratch_path
from gpt2_accel.hf import hub

SILENCE = timedelta(minutes=3)  # a running run without a heartbeat for this long was killed


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Returns the checkpoints of a run's folder, oldest first."""
    found = {
        int(match[1]): path
        for path in Path(run_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    }
    return [found[step] for step in sorted(found)]


def find_checkpoint(
    resume_from: str | None, run_dir: str | Path, print_line: Callable[[str], None] = print
) -> Path | None:
    """Returns the checkpoint that `resume_from` names; None for a new run.

    `latest` is the newest intact checkpoint of `run_dir`; damaged ones are skipped and reported through `print_line`. A
    Hub id names the checkpoint that a run with `--hub_strategy checkpoint` pushed.

    Raises `FileNotFoundError` if the path is not a checkpoint, `ValueError` if it is damaged or if `latest` finds only
    damaged ones, and `FileExistsError` if the run would overwrite checkpoints of another run or a model.
    """
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints and any(Path(run_dir).glob("model*.safetensors")):
        raise FileExistsError(
            f"{run_dir} holds a model but no checkpoint to continue, and a run would overwrite the model: "
            "choose another --output_dir"
        )
    if resume_from is None:
        if checkpoints:
            raise FileExistsError(
                f"{run_dir} holds {checkpoints[-1].name} of an earlier run: continue it with "
                "--resume_from latest, or choose another --output_dir"
            )
        return None
    if resume_from == "latest":
        for path in reversed(checkpoints):
            if (problem := find_corruption(path)) is None:
                return path
            print_line(f"{path} is skipped: {problem}")
        if checkpoints:
            raise ValueError(
                f"all checkpoints in {run_dir} are damaged: choose another --output_dir to start afresh"
            )
        return None
    path = resolve_link(Path(resume_from))
    if not path.exists() and hub.is_repo_id(resume_from):
        path = hub.download(resume_from, ("*",), hub.LAST_CHECKPOINT)
    if not is_checkpoint(path):
        inside = [
            Path(run_dir) / resume_from,
            *reversed(list_checkpoints(path)),
            *reversed(checkpoints),
        ]
        meant = next(filter(is_checkpoint, inside), None)
        there = path.exists() or hub.is_repo_id(resume_from)
        what = "is not a checkpoint of this toolkit" if there else "does not exist"
        raise FileNotFoundError(
            f"--resume_from {resume_from} {what}: "
            + (
                f"did you mean --resume_from {meant}?"
                if meant
                else "give a checkpoint-<step> folder, or a Hub id that a run with --hub_strategy checkpoint pushed to"
            )
        )
    if problem := find_corruption(path):
        raise ValueError(f"{path} is damaged: {problem}; resume from another checkpoint")
    if checkpoints and checkpoints[-1].resolve() != path.resolve():
        raise FileExistsError(
            f"{run_dir} holds {checkpoints[-1].name}, which a resume from {path} would overwrite: "
            "choose another --output_dir"
        )
    return path


def is_checkpoint(path: Path) -> bool:
    """Whether a folder holds a checkpoint of this toolkit."""
    return (path / STATE / "state.json").is_file()


def model_directory(name: str | Path) -> str | Path:
    """Returns the directory of a run's newest weights: its last checkpoint, or the run's folder if the run is finished,
    or its `status.json` missing, and the folder has the final model. `latest` and `best` are resolved by `resolve_link`.
    Any other name is returned unchanged."""
    checkpoints = list_checkpoints(name)
    if checkpoints:
        # A finished run that trains on keeps its former model until it is finished again.
        finished = read_status(Path(name)).get("state", "finished") == "finished"
        return name if finished and (Path(name) / "config.json").exists() else checkpoints[-1]
    found = resolve_link(Path(name))
    return name if found == Path(name) else found


def read_status(run_dir: Path) -> dict:
    """Reads a run's `status.json`; an empty dict if it is missing or damaged. A `running` state without a heartbeat for
    `SILENCE` becomes `killed`."""
    try:
        status = parse_json((run_dir / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(status, dict):
        return {}
    try:
        silent = datetime.now(UTC) - datetime.fromisoformat(status["time"])
    except (KeyError, TypeError, ValueError):  # written by an older release
        return status
    if status.get("state") == "running" and silent > SILENCE:
        status |= {"state": "killed", "reason": f"no heartbeat since {status['time']}"}
    return status


def verified_directory(
    name: str | Path,
    verify: bool = True,
    hint: str = "use another checkpoint, or this one as it is with --verify false",
) -> str | Path:
    """Returns `model_directory(name)` after it has compared the model's files, without those of `training_state/`, with
    the checkpoint's manifest. A directory that is no checkpoint is not checked, nor is any if `verify` is False.

    Raises `ValueError`, with `hint` at its end, if a file does not match.
    """
    directory = model_directory(name)
    path = Path(directory)
    if verify and (path / STATE).is_dir() and (problem := find_corruption(path, model_only=True)):
        raise ValueError(f"{path} is damaged: {problem}; {hint}")
    return directory


def resolve_link(path: Path) -> Path:
    """Resolves a run's `latest` or `best` to a checkpoint; returns any other path unchanged.

    They are links. In a copied run they may be folders, which later saves do not update.
    """
    if path.name not in ("latest", "best") or path.is_symlink() or not path.is_dir():
        return path
    others = list_checkpoints(path.parent)
    if path.name == "best":
        return best_checkpoint([path, *others]) or path
    try:
        return others[-1] if others and step_of(others[-1]) > read_state(path)["step"] else path
    except ValueError:  # not a checkpoint
        return path


def step_of(checkpoint: Path) -> int:
    """Returns the number of updates in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def best_checkpoint(checkpoints: list[Path]) -> Path | None:
    """Returns the checkpoint with the lowest validation loss; None if none was evaluated."""
    losses = {}
    for path in checkpoints:
        try:
            loss = read_state(path)["val_loss"]
        except ValueError:  # damaged since it was written
            continue
        if loss is not None:
            losses[path] = loss
    return min(losses, key=losses.get, default=None)


def point_to(link: Path, target: Path) -> None:
    """Atomically makes `link` a symbolic link to `target`, in the same folder.

    The link is optional: does nothing on file systems without symbolic links (buckets, Colab's Drive). Raises
    `IsADirectoryError` if `link` is a folder, as in a copied run.
    """
    if link.is_dir() and not link.is_symlink():
        raise IsADirectoryError(f"{link} is a folder, not a link to {target.name}")
    new = scratch_path(link)
    with suppress(OSError):
        new.symlink_to(target.name)
        new.replace(link)
    remove(new)


def clean_up(run_dir: str | Path) -> None:
    """Removes partial checkpoints that killed processes left, also those of other machines.

    The caller must hold the folder's lock, so that no other process is writing a checkpoint there.
    """
    for path in Path(run_dir).glob(".checkpoint-*"):
        remove(path)
