"""Logs to the experiment trackers wandb, TensorBoard and trackio, through Accelerate.

A run's id is in its checkpoints, so a resumed run continues the same run in each tracker. After a kill a tracker may
have steps after the last checkpoint, or lack steps that it had not written yet. TensorBoard drops the former
(`purge_step`); wandb and trackio cannot and keep them. Each tracker is then sent the lines of `metrics.jsonl` from the
first step that it lacks. wandb's offline mode does not know earlier steps: each of its folders gets the whole run.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from textwrap import indent

import yaml
from accelerate import Accelerator
from accelerate.tracking import (
    GeneralTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
)

from gpt2_accel.config import TrainConfig
from gpt2_accel.files import first_line, read_json_lines
from gpt2_accel.options import check_separate
from gpt2_accel.runtime.log import Sink
from gpt2_accel.runtime.metadata import RunMetadata

TRACKERS = {  # name -> what to install
    "wandb": "wandb>=0.20",
    "tensorboard": "tensorboard>=2.16",
    "trackio": "trackio>=0.40",
}
PROJECT = "gpt2_accel"
HINTS = {
    "wandb": "log in with `wandb login`, or set WANDB_MODE=offline, which needs no account or network",
    "tensorboard": "make room or choose another --output_dir",
    "trackio": "set TRACKIO_DIR to a folder that can be written, and no TRACKIO_SPACE_ID to stay local",
}


def check_trackers(names: list[str]) -> None:
    """Raises `ValueError` if a name is not in `TRACKERS` or its package is not installed."""
    check_separate("report_to", names, TRACKERS)
    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"report_to has the unknown tracker {name!r}: choose from {', '.join(TRACKERS)}, or leave it out"
            )
        if name not in installed:  # Accelerate would drop it silently
            raise ValueError(
                f"--report_to {name}: {name} is not installed: pip install '{TRACKERS[name]}'"
            )


def run_identity(config: TrainConfig, checkpoint: Path | None, run_id: str | None) -> str:
    """Returns the id of a run that resumes from `checkpoint`: its `run_id`, or a new id of eight characters.

    The id is new if `run_id` is None, or if the checkpoint is in another run's folder: the run is then a branch.
    """
    folder = checkpoint.parent if checkpoint else Path(config.output_dir)
    branch = (
        folder.resolve() != Path(config.output_dir).resolve() and (folder / "run.json").exists()
    )
    return secrets.token_hex(4) if branch or run_id is None else run_id


class Trackers(Sink):
    """The trackers of `config.report_to`; a context manager around the run's loop. `step` updates are done before.

    Entering starts them and sends them the lines of `metrics.jsonl` that they lack. Raises `OSError` if one cannot be
    started. A tracker that fails later is passed to `report` and dropped, and the run continues.
    """

    def __init__(
        self,
        config: TrainConfig,
        metadata: RunMetadata,
        accelerator: Accelerator,
        step: int,
        report: Callable[[str], None],
    ):
        self.config, self.metadata, self.accelerator = config, metadata, accelerator
        self.step, self.report = step, report
        self._newest: dict[GeneralTracker, int] = {}  # the last step that each tracker has

    def __enter__(self) -> "Trackers":
        try:
            for name in dict.fromkeys(self.config.report_to):
                self._start(self._build(name))
        except OSError as error:
            self.__exit__(type(error))
            raise
        if self.config.report_to:
            for line in read_json_lines(Path(self.config.output_dir) / "metrics.jsonl"):
                self.write(line)
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        for tracker in self.accelerator.trackers:
            with suppress(Exception):  # a tracker's failure must not fail the run
                if tracker.name == "wandb":
                    tracker.tracker.finish(exit_code=0 if kind is None else 1)
                else:
                    tracker.finish()
        self.accelerator.trackers.clear()

    def _build(self, name: str) -> GeneralTracker:
        folder = Path(self.config.output_dir)
        title = folder.resolve().name
        about = {**self.config.settings(), **asdict(self.metadata)}
        if name == "wandb":
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            place = {"id": self.metadata.run_id, "name": title, "dir": str(folder)}
            return WandBTracker(project, resume="allow", config=about, **place)
        if name == "trackio":
            unique = f"{title}-{self.metadata.run_id}"
            return TrackioTracker(PROJECT, name=unique, resume="allow", config=about)
        # The folder has release 0.3's name: its runs resume as one curve.
        tracker = TensorBoardTracker("updates", folder / "tensorboard", purge_step=self.step + 1)
        if (folder / "tensorboard").exists():
            self._newest[tracker] = self.step
        return tracker

    def _start(self, tracker: GeneralTracker) -> None:
        try:
            tracker.start()
            run = tracker.tracker
            if tracker.name == "wandb":
                run.define_metric("tokens")
                run.define_metric("*", step_metric="tokens")
                self._newest[tracker] = run.starting_step - 1
            elif tracker.name == "trackio":
                self._newest[tracker] = run._next_step - 1
            else:
                about = yaml.safe_dump({**self.config.settings(), **asdict(self.metadata)})
                tracker.log({"about": indent(about, "    ")}, step=self.step)  # Markdown's code
        except Exception as error:  # each library has its own types
            raise OSError(
                f"{tracker.name} cannot be started ({first_line(error)}): {HINTS[tracker.name]}"
            ) from error
        self.accelerator.trackers.append(tracker)

    def write(self, line: dict) -> None:
        """Sends a line of `metrics.jsonl` to each tracker that lacks its step."""
        values = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        step = values.pop("step")
        for tracker in list(self.accelerator.trackers):
            if step <= self._newest.get(tracker, -1):
                continue
            # Without `commit` wandb holds a step back until the next one, and a kill would lose it.
            options = {"commit": True} if tracker.name == "wandb" else {}
            try:
                tracker.log(values, step=step, **options)
            except Exception as error:
                self.accelerator.trackers.remove(tracker)
                self.report(f"{tracker.name} failed and gets no further steps: {first_line(error)}")
