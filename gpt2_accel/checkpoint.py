"""Checkpoints: an HF model directory, and under `training_state/` what only a resume needs.

    checkpoint-<step>/
        config.json, model.safetensors, tokenizer.json, …      opens in transformers
        training_state/optimizer.safetensors                   its tensors, by parameter name
        training_state/state.json                              step, optimizer, scaler, guard, data, run id
        training_state/manifest.json                           size and SHA-256 of every file above

There is little to keep: data order, learning rate and random seeds are functions of the step. A checkpoint
is copied to host memory, then written behind the loop: aside, synced, checksummed, renamed.
"""

import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from gpt2_accel import hub
from gpt2_accel.convert import save_pretrained
from gpt2_accel.files import atomic_directory, discard, write_json
from gpt2_accel.launch import is_sharded
from gpt2_accel.model import GPT
from gpt2_accel.tensors import (
    full_model,
    host_copy,
    load_optimizer_tensors,
    optimizer_name,
    optimizer_tensors,
)
from gpt2_accel.wholeness import STATE, damage, read_state, write_manifest


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first."""
    found = {
        int(match[1]): path
        for path in Path(run_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [found[step] for step in sorted(found)]


def find_checkpoint(
    resume_from: str | None, run_dir: str | Path, say: Callable[[str], None] = print
) -> Path | None:
    """The checkpoint that `--resume_from` means, None for a fresh start.

    `latest` is the newest whole one of `run_dir`; those passed over are named through `say`. A Hub id
    means what a run with `--hub_strategy checkpoint` pushed there.

    Raises `FileNotFoundError` if the path is not a checkpoint, `ValueError` if it is damaged, or if `latest`
    finds only damaged ones; `FileExistsError` if the run would write over checkpoints of another.
    """
    checkpoints = list_checkpoints(run_dir)
    if resume_from is None:
        if checkpoints:
            raise FileExistsError(
                f"{run_dir} holds {checkpoints[-1].name} of an earlier run: continue it with "
                "--resume_from latest, or choose another --output_dir"
            )
        return None
    if resume_from == "latest":
        for path in reversed(checkpoints):
            if (problem := damage(path)) is None:
                return path
            say(f"{path} is passed over: {problem}")
        if checkpoints:
            raise ValueError(
                f"all checkpoints in {run_dir} are damaged: choose another --output_dir to start afresh"
            )
        return None
    path = Path(resume_from)
    if not path.exists() and hub.is_repo_id(resume_from):
        path = hub.download(resume_from, ("*",), hub.LAST_CHECKPOINT)
    if not (path / STATE / "state.json").is_file():
        raise FileNotFoundError(
            f"--resume_from {resume_from} is not a checkpoint of this toolkit: give a checkpoint-<step> "
            "folder, or a Hub id that a run with --hub_strategy checkpoint pushed to"
        )
    if problem := damage(path):
        raise ValueError(f"{path} is damaged: {problem}; resume from another checkpoint")
    if checkpoints and checkpoints[-1].resolve() != path.resolve():
        raise FileExistsError(
            f"{run_dir} holds {checkpoints[-1].name}, which going on from {path} would write over: "
            "choose another --output_dir"
        )
    return path


def model_directory(name: str | Path) -> str | Path:
    """Where the newest weights of a run's folder are: in the folder itself once training has ended, in
    its last checkpoint before. Any other name is returned as it is."""
    checkpoints = list_checkpoints(name)
    if checkpoints and not (Path(name) / "config.json").exists():
        return checkpoints[-1]
    return name


@dataclass
class Snapshot:
    """A checkpoint in host memory: all that is written to disk."""

    step: int
    model: GPT
    optimizer: dict[str, torch.Tensor]
    state: dict
    training: hub.Training


class CheckpointWriter:
    """Writes the checkpoints of a run, each in the background while the loop goes on.

    The link `latest` leads to the newest. `keep_last` newest ones stay, every one whose step is a multiple of `keep_every` (0: none), and with
    `keep_best` the one of lowest validation loss, which the link `best` leads to. `saved` is called with
    each new one, in the background too. A write that fails is reported through `say` and leaves the
    older checkpoints as they are.
    """

    def __init__(
        self,
        run_dir: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_last: int,
        keep_every: int = 0,
        keep_best: bool = False,
        saved: Callable[[Path], None],
        say: Callable[[str], None],
    ):
        self.run_dir, self.tokenizer = Path(run_dir), tokenizer
        self.keep_last, self.keep_every, self.keep_best = keep_last, keep_every, keep_best
        self.saved, self.say = saved, say
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        step: int,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        training: hub.Training,
        *,
        guard: dict,
        data: str,
        val_loss: float | None,
        run_id: str,
    ) -> None:
        """Copies the prepared `model` and `optimizer` to host memory and starts to write them.

        `step` is the number of updates done; `guard` the state of the `Guard`; `data` the fingerprint of
        the data; `val_loss` the validation loss, if evaluated at this step; `run_id` the trackers' name of the
        run. Waits for the write before, if that is still going on. All ranks call it.
        """
        if not (accelerator.is_main_process or is_sharded(accelerator)):
            return
        self._join()
        plain = full_model(accelerator, model)
        states = optimizer_tensors(optimizer).items()
        optimizer_state = {name: host_copy(tensor) for name, tensor in states}
        if not accelerator.is_main_process:
            return
        snapshot = Snapshot(
            step,
            plain,
            optimizer_state,
            {
                "step": step,
                "optimizer": optimizer_name(optimizer),
                "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
                "guard": guard,
                "data": data,
                "val_loss": val_loss,
                "run_id": run_id,
            },
            training,
        )
        self._thread = threading.Thread(target=self._write, args=(snapshot,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk; raises `OSError` if it could not be written."""
        self._join()
        if self._error is not None:
            message = f"the last checkpoint could not be written: {self._error}"
            raise OSError(message) from self._error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, snapshot: Snapshot) -> None:
        path = self.run_dir / f"checkpoint-{snapshot.step}"
        try:
            with atomic_directory(path, replace=True) as folder:
                save_pretrained(snapshot.model, folder, self.tokenizer, training=snapshot.training)
                (folder / STATE).mkdir()
                save_file(snapshot.optimizer, folder / STATE / "optimizer.safetensors")
                write_json(folder / STATE / "state.json", snapshot.state)
                write_manifest(folder)
            self._error = None
            self.rotate(snapshot.step)
            self.saved(path)
        except Exception as error:  # the run goes on: the next may succeed
            self._error = error
            self.say(f"{path.name} could not be written, training goes on: {error}")

    def rotate(self, step: int) -> None:
        """Removes what is not to be kept beside the whole checkpoint of `step`.

        Newer ones, which can only be damaged, neither count nor go: the run will write them again.
        """
        checkpoints = [path for path in list_checkpoints(self.run_dir) if step_of(path) <= step]
        keep = checkpoints[-self.keep_last :]
        if self.keep_every:
            keep += [path for path in checkpoints if step_of(path) % self.keep_every == 0]
        if self.keep_best and (best := best_checkpoint(checkpoints)):
            keep.append(best)
            point_to(self.run_dir / "best", best)
        if checkpoints:
            point_to(self.run_dir / "latest", checkpoints[-1])
        for path in checkpoints:
            if path not in keep:
                discard(path)


def step_of(checkpoint: Path) -> int:
    """The number of updates in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def best_checkpoint(checkpoints: list[Path]) -> Path | None:
    """The one of lowest validation loss among those that were evaluated."""
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
    """Makes `link` a symbolic link to its neighbour `target`, in one step."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.name)
    new.replace(link)


def clean_up(run_dir: str | Path) -> None:
    """Removes what a killed process left half-written. Only for the one that holds the folder."""
    for pattern in (".checkpoint-*.partial", ".checkpoint-*.old"):
        for path in Path(run_dir).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def load_training_state(
    path: Path, accelerator: Accelerator, optimizer: torch.optim.Optimizer
) -> dict:
    """Puts a checkpoint's optimizer and scaler state back; returns `step` and what else was saved.

    The weights are not its business: the model was built from the same folder.
    Raises `ValueError` if the state is that of another optimizer or model.
    """
    state = read_state(path)
    if state["optimizer"] != optimizer_name(optimizer):
        raise ValueError(
            f"{path} was trained with {state['optimizer']}, not {optimizer_name(optimizer)}: "
            "resume with the --optimizer of the first run"
        )
    load_optimizer_tensors(optimizer, load_file(path / STATE / "optimizer.safetensors"), path)
    if accelerator.scaler and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    return state
