"""Writes checkpoints: an HF model directory with the training state in `training_state/`.

    checkpoint-<step>/
        config.json, model.safetensors, tokenizer.json, …      opens in transformers
        training_state/optimizer.safetensors                   its tensors, by parameter, if any
        training_state/callbacks.safetensors                   the tensors of callbacks, if any
        training_state/state.json                              step, optimizer, data, position, …
        training_state/manifest.json                           size and SHA-256 of the files above

Data order, learning rate and random seeds are functions of the step, so they are not saved. A
checkpoint is copied to host memory, then written in the background: into a temporary folder, with
checksums, synced to disk and renamed.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpt2_accel.checkpoint.find import (
    CHECKPOINT_MANIFEST,
    STATE,
    best_checkpoint,
    file_entry,
    list_checkpoints,
    point_to,
    step_of,
)
from gpt2_accel.config import TrainConfig
from gpt2_accel.hf.comparison import ModelFiles
from gpt2_accel.hf.model_card import Training
from gpt2_accel.models import LanguageModel
from gpt2_accel.runtime.files import atomic_directory, hide, remove, sentence, write_json


@dataclass
class CheckpointWriter(AbstractContextManager):
    """Writes the checkpoints of a run in the background while training continues.

    It keeps the `keep_last` newest checkpoints, those whose step is a multiple of `keep_every` (0:
    none), and with `keep_best` the one with the lowest validation loss. While the run trains it
    keeps one more: the updates after the newest may show that its weights are destroyed. The links
    `latest` and `best` point to the newest and the best.

    `written` is the newest checkpoint, until the run has reported it, and `best` the one that
    `keep_best` keeps, `about_best` what it is. A failure of the disk is reported through
    `print_line`, and older checkpoints stay. Any other error in the background is a bug: `bug`
    holds it, and `join` raises it.
    """

    config: TrainConfig
    files: ModelFiles
    print_line: Callable[[str], None]
    written: Path | None = None
    best: Path | None = None
    about_best: str = ""
    bug: Exception | None = None
    _problem: str = ""
    _thread: threading.Thread | None = None

    def save(self, *snapshot: Any) -> None:
        """Starts to write a checkpoint, after the previous one; takes the arguments of `_write`."""
        self.join()
        self._thread = threading.Thread(target=self._write, args=snapshot, daemon=True)
        self._thread.start()

    def __exit__(self, kind: type | None, *_: Any) -> None:
        """Waits for a running write, also after an error, but not after a second Ctrl-C."""
        if kind is not KeyboardInterrupt:
            self._wait()

    def join(self) -> str:
        """Waits until the last checkpoint is on disk. Returns the disk's error, or an empty text.

        Raises `bug`.
        """
        self._wait()
        if self.bug is not None:
            raise self.bug
        return self._problem

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(
        self,
        model: LanguageModel,
        tensors: dict[str, dict[str, torch.Tensor]],
        state: dict[str, Any],
        training: Training,
    ) -> None:
        """Writes a checkpoint.

        `model` and `tensors` are copies in host memory; `tensors` has the tensors of each file in
        `training_state/`. `state` is `state.json`, `training` describes the run for the model card.
        """
        path = Path(self.config.output_dir) / f"checkpoint-{state['step']}"
        try:
            self.rotate(state["step"] - 1)  # the run has trained on past these
            with atomic_directory(path, replace=True) as folder:
                self.files.save(model, folder, training, str(path))
                (folder / STATE).mkdir()
                for name, part in tensors.items():
                    if part:
                        save_file(part, folder / STATE / f"{name}.safetensors")
                write_json(folder / STATE / "state.json", state)
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                names = [path.relative_to(folder).as_posix() for path in files]
                write_manifest(folder, CHECKPOINT_MANIFEST, names)
            self.link(state["step"])
            self.written = path
            self._problem = ""
        except OSError as error:  # the next write may succeed
            problem = sentence(error)
            if problem != self._problem:  # the end of a run tries the last one again
                self.print_line(f"{path.name} could not be written: {problem}")
            self._problem = problem
        except Exception as error:
            self.bug = error

    def rotate(self, step: int) -> None:
        """Removes the checkpoints up to `step` that are not to be kept.

        Newer ones can only be damaged. They are not counted or removed: the run replaces them.
        """
        checkpoints = self._up_to(step)
        keep = [*checkpoints[-self.config.keep_last :], self.best]
        every = self.config.keep_every
        if every:
            keep += [path for path in checkpoints if step_of(path) % every == 0]
        for path in checkpoints:
            if path not in keep:
                try:
                    remove(hide(path))  # a kill must not leave a part of it under its name
                except OSError as error:
                    self.print_line(f"{path.name} could not be removed: {sentence(error)}")

    def link(self, step: int) -> None:
        """Points the links to the newest and the best checkpoint up to `step`."""
        checkpoints = self._up_to(step)
        self.best = best_checkpoint(checkpoints) if self.config.keep_best else None
        if self.best is not None:
            point_to("best", self.best)
            self.about_best = f"{self.best.name}, which has the lowest val/loss"
        if checkpoints:
            point_to("latest", checkpoints[-1])

    def _up_to(self, step: int) -> list[Path]:
        return [path for path in list_checkpoints(self.config.output_dir) if step_of(path) <= step]


def write_manifest(folder: Path, manifest: str, names: Iterable[str]) -> None:
    """Writes the manifest of files of a checkpoint or a final model."""
    write_json(folder / manifest, {"files": {name: file_entry(folder / name) for name in names}})
