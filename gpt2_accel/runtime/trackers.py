"""Logs to the experiment trackers wandb, TensorBoard and trackio, through Accelerate.

A run's id is in its checkpoints, so a resumed run continues the same run in each tracker. After a kill a tracker may
have steps after the last checkpoint, or lack steps that it had not written yet. TensorBoard drops the former
(`purge_step`); wandb and trackio cannot and keep them. Each tracker is then sent the lines of `metrics.jsonl` from the
first step that it lacks. wandb's offline mode does not know earlier steps: each of its folders gets the whole run.
"""

import os
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import (
    GeneralTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
)

from gpt2_accel.config import TrainConfig
from gpt2_accel.files import first_line
from gpt2_accel.runtime.log import RunLog

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


class Trackers:
    """The trackers of `config.report_to`; a context manager around the run's loop. `step` updates are done before;
    `metadata` is the content of `run.json`.

    Entering starts them and sends them the lines of `metrics.jsonl` that they lack. Raises `OSError` if one cannot be
    started. A tracker that fails later is reported in `log` and dropped, and the run continues.
    """

    def __init__(self, config: TrainConfig, metadata: dict, accelerator: Accelerator, log: RunLog):
        self._folder, self._names, self._log = Path(config.output_dir), config.report_to, log
        self._run_id, self._about = metadata["run_id"], {**config.settings(), **metadata}
        self._trackers = accelerator.trackers
        self._newest: dict[GeneralTracker, int] = {}  # the last step that each tracker has

    def __enter__(self) -> "Trackers":
        for name in dict.fromkeys(self._names):
            try:
                tracker, newest = self._start(name)
            except Exception as error:  # each library has its own types
                self.__exit__(type(error))
                message = (
                    f"{name} cannot be started ({first_line(error)}): leave it out of --report_to"
                )
                raise OSError(message) from error
            self._trackers.append(tracker)
            self._newest[tracker] = newest
        for line in self._log.earlier:
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
        folder, step = self._folder / "tensorboard", self._log.step
        newest = step if folder.exists() else -1
        tracker = TensorBoardTracker("updates", folder, purge_step=step + 1)
        tracker.start()
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
                reason = first_line(error)
                self._log.print_line(f"{tracker.name} failed and gets no further steps: {reason}")
