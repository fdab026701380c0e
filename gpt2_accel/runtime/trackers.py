"""Logs to the experiment trackers wandb, TensorBoard and trackio, through Accelerate.

A run's id is in its checkpoints, so a resumed run continues the same run in each tracker. After a
kill a tracker may have steps after the last checkpoint. TensorBoard drops them (`purge_step`),
wandb keeps them, trackio gets them again.
"""

import os
from pathlib import Path

from accelerate.tracking import (
    GeneralTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from gpt2_accel.config import TrainConfig
from gpt2_accel.runtime.files import first_line

PROJECT = "gpt2_accel"


def start_tracker(name: str, config: TrainConfig, metadata: dict, step: int) -> GeneralTracker:
    """Starts a tracker after `step` updates; `metadata` is the content of `run.json`.

    Raises `OSError` if it cannot be started.
    """
    folder = Path(config.output_dir)
    run_id = metadata["run_id"]
    title = folder.resolve().name
    about = {"config": config.settings() | metadata, "resume": "allow"}
    try:
        if name == "wandb":
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            tracker = WandBTracker(project, id=run_id, name=title, dir=str(folder), **about)
        elif name == "trackio":
            tracker = TrackioTracker(PROJECT, name=f"{title}-{run_id}", **about)
        else:  # the name by which a resumed run is one curve
            tracker = TensorBoardTracker("updates", folder / "tensorboard", purge_step=step + 1)
        tracker.start()
        if name == "wandb":
            tracker.tracker.define_metric("tokens")
            tracker.tracker.define_metric("*", step_metric="tokens")
    except Exception as error:  # each library has its own types
        fix = f"pip install '{name}'" if isinstance(error, ImportError) else "correct that"
        raise OSError(
            f"{name} cannot be started ({first_line(error)}): {fix}, or leave it out of --report_to"
        ) from error
    return tracker
