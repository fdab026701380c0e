"""Logs to the experiment trackers wandb, TensorBoard and trackio, through Accelerate.

A run's id is in its checkpoints, so a resumed run continues the same run in each tracker. After a kill a tracker may
have steps after the last checkpoint, or lack steps that it had not written yet. TensorBoard drops the former
(`purge_step`); wandb and trackio cannot and keep them. Each tracker is then sent the lines of `metrics.jsonl` from the
first step that it lacks. wandb's offline mode does not know earlier steps: each of its folders gets the whole run.
"""

import os
from collections.abc import Callable
from contextlib import suppress
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
from gpt2_accel.runtime.log import Sink

TRACKERS = {  # name -> what to install
    "wandb": "wandb>=0.20",
    "tensorboard": "tensorboard>=2.16",
    "trackio": "trackio>=0.40",
}
PROJECT = "gpt2_accel"


def check_trackers(names: list[str]) -> None:
    """Raises `ValueError` if a name is not in `TRACKERS` or its package is not installed."""
    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"report_to has the unknown tracker {name!r}: choose from {', '.join(TRACKERS)}, with spaces between"
            )
        if name not in installed:  # Accelerate would drop it silently
            raise ValueError(
                f"--report_to {name}: {name} is not installed: pip install '{TRACKERS[name]}'"
            )


class Trackers(Sink):
    """The trackers of `config.report_to`; a context manager around the run's loop. `step` updates are done before;
    `metadata` is the content of `run.json`.

    Entering starts them and sends them the lines of `metrics.jsonl` that they lack. Raises `OSError` if one cannot be
    started. A tracker that fails later is passed to `report` and dropped, and the run continues.
    """

    def __init__(
        self,
        config: TrainConfig,
        metadata: dict,
        accelerator: Accelerator,
        step: int,
        report: Callable[[str], None],
    ):
        self._folder, self._names = Path(config.output_dir), config.report_to
        self._run_id, self._about = metadata["run_id"], {**config.settings(), **metadata}
        self._trackers, self._step, self._report = accelerator.trackers, step, report
        self._newest: dict[GeneralTracker, int] = {}  # the last step that each tracker has

    def __enter__(self) -> "Trackers":
        for name in dict.fromkeys(self._names):
            try:
                tracker, newest = self._start(name)
            except Exception as error:  # each library has its own types
                self.__exit__(type(error))
                hint = (
                    "; or set WANDB_MODE=offline, which needs no account" if name == "wandb" else ""
                )
                raise OSError(f"{name} cannot be started ({first_line(error)}){hint}") from error
            self._trackers.append(tracker)
            self._newest[tracker] = newest
        if self._trackers:
            for line in read_json_lines(self._folder / "metrics.jsonl"):
                self.write(line)
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        for tracker in self._trackers:
            with suppress(Exception):  # a tracker's failure must not fail the run
                if tracker.name == "wandb":
                    tracker.tracker.finish(exit_code=0 if kind is None else 1)
                else:
                    tracker.finish()
        self._trackers.clear()

    def _start(self, name: str) -> tuple[GeneralTracker, int]:
        """Starts a tracker. Returns it and the last step that it has."""
        title = self._folder.resolve().name
        if name == "wandb":
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            place = {"id": self._run_id, "name": title, "dir": str(self._folder)}
            tracker = WandBTracker(project, resume="allow", config=self._about, **place)
            tracker.start()
            tracker.tracker.define_metric("tokens")
            tracker.tracker.define_metric("*", step_metric="tokens")
            return tracker, tracker.tracker.starting_step - 1
        if name == "trackio":
            unique = f"{title}-{self._run_id}"
            tracker = TrackioTracker(PROJECT, name=unique, resume="allow", config=self._about)
            tracker.start()
            return tracker, tracker.tracker._next_step - 1
        # The folder has release 0.3's name: its runs resume as one curve.
        newest = self._step if (self._folder / "tensorboard").exists() else -1
        folder = self._folder / "tensorboard"
        tracker = TensorBoardTracker("updates", folder, purge_step=self._step + 1)
        tracker.start()
        about = indent(yaml.safe_dump(self._about), "    ")  # Markdown's code
        tracker.log({"about": about}, step=self._step)
        return tracker, newest

    def write(self, line: dict) -> None:
        """Sends a line of `metrics.jsonl` to each tracker that lacks its step."""
        values = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        step = values.pop("step")
        for tracker in list(self._trackers):
            if step <= self._newest[tracker]:
                continue
            # Without `commit` wandb holds a step back until the next one, and a kill would lose it.
            options = {"commit": True} if tracker.name == "wandb" else {}
            try:
                tracker.log(values, step=step, **options)
            except Exception as error:
                self._trackers.remove(tracker)
                self._report(
                    f"{tracker.name} failed and gets no further steps: {first_line(error)}"
                )
