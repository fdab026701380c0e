"""Logs to the experiment trackers wandb, TensorBoard and trackio, through Accelerate.

A run's id is in its checkpoints, so a resumed run continues the same run in each tracker. After a kill a tracker may have
steps after the last checkpoint. TensorBoard drops them (`purge_step`), wandb keeps them, trackio gets them again.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate.tracking import (
    GeneralTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from gpt2_accel.config import TrainConfig
from gpt2_accel.files import first_line
from gpt2_accel.runtime.log import RunLog

PROJECT = "gpt2_accel"


def start_tracker(name: str, config: TrainConfig, metadata: dict, step: int) -> GeneralTracker:
    """Starts a tracker, with the settings and `metadata`, the content of `run.json`. `step` updates are done before."""
    folder, run_id = Path(config.output_dir), metadata["run_id"]
    title = folder.resolve().name
    about = {"config": {**config.settings(), **metadata}, "resume": "allow"}
    if name == "wandb":
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        tracker = WandBTracker(project, id=run_id, name=title, dir=str(folder), **about)
    elif name == "trackio":
        tracker = TrackioTracker(PROJECT, name=f"{title}-{run_id}", **about)
    else:  # the folder has release 0.3's name: its runs resume as one curve
        tracker = TensorBoardTracker("updates", folder / "tensorboard", purge_step=step + 1)
    tracker.start()
    if name == "wandb":
        tracker.tracker.define_metric("tokens")
        tracker.tracker.define_metric("*", step_metric="tokens")
    return tracker


@contextmanager
def open_trackers(
    config: TrainConfig, metadata: dict, log: RunLog
) -> Iterator[Callable[[dict], None]]:
    """Starts the trackers of `config.report_to` and ends them after the block. Yields the function that sends them a line of
    `metrics.jsonl`.

    Raises `OSError` if one cannot be started. A tracker that fails later is reported in `log` and dropped, and the run
    continues.
    """
    trackers: list[GeneralTracker] = []

    def write(line: dict) -> None:
        values = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        step = values.pop("step")
        for tracker in list(trackers):
            # Without `commit` wandb holds a step back until the next one, and a kill would lose it.
            options = {"commit": True} if tracker.name == "wandb" else {}
            try:
                tracker.log(values, step=step, **options)
            except Exception as error:  # each library has its own types
                trackers.remove(tracker)
                reason = first_line(error)
                log.print_line(f"{tracker.name} failed and gets no further steps: {reason}")

    try:
        for name in dict.fromkeys(config.report_to):
            try:
                trackers.append(start_tracker(name, config, metadata, log.step))
            except Exception as error:
                missing = isinstance(error, ImportError)
                fix = f"pip install '{name}'" if missing else "correct that"
                raise OSError(
                    f"{name} cannot be started ({first_line(error)}): {fix}, or leave it out of --report_to"
                ) from error
        yield write
    finally:
        for tracker in trackers:
            with suppress(Exception):  # a tracker's failure must not fail the run
                tracker.finish()
