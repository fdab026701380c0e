"""What a checkpoint of a run holds: saving it, and resuming from it. All ranks call it all."""

from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpt2_accel import __version__
from gpt2_accel.checkpoint.find import read_state
from gpt2_accel.checkpoint.state_dict import RunState, check_json, full_model, gather_to_host
from gpt2_accel.config import SHAPE
from gpt2_accel.optim import evaluating_optimizer
from gpt2_accel.run import Run, call, diverged, goes_on
from gpt2_accel.runtime.files import sync
from gpt2_accel.runtime.metadata import changed_settings, describe_training
from gpt2_accel.runtime.processes import all_or_none, on_main_process


def order_of(run: Run) -> dict[str, Any]:
    """Returns the settings that determine the order of the data."""
    return {
        "seed": run.config.seed,
        "sequence_length": run.config.tokens_per_sequence,
        "data": run.data.fingerprint,
    }


def resume(run: Run, checkpoint: Path) -> None:
    """Restores the state of a checkpoint. The model has its weights already.

    Raises `ValueError` if the model's shape, the dtype or a setting of LoRA has changed. Unless
    `ignore_changes` is set, also if the data or a setting that determines its order has changed, or
    if the checkpoint has the state of a callback that the run does not have.
    """
    config = run.config
    with all_or_none():
        saved = read_state(checkpoint)
        for name, value in order_of(run).items():
            if saved[name] != value and not config.ignore_changes:
                was = f"the {name} {saved[name]}, not {value}"
                if name == "data":  # by a digest
                    was = f"other data than {run.data.name}"
                raise ValueError(
                    f"{checkpoint} was trained with {was}, which changes the order of the data: "
                    "resume with the original value, or with --ignore_changes"
                )
        step = saved["step"]
        tokens = saved["position"]["sequences"] * saved["sequence_length"]
        run.changes = changed_settings(config, saved["settings"], step, tokens)
        for name, change in run.changes.items():
            if name in SHAPE or name.startswith(("lora", "dtype")):
                raise ValueError(
                    f"{change}: resume with the original value, or choose another --output_dir for "
                    "a new model"
                )
        for name, value in saved["parts"].items():
            if value != run.parts[name]:
                run.changes[name] = f"{name} {value} -> {run.parts[name]} from update {step}"
        # A checkpoint of 0.6 lacks some of them.
        known = {name: saved[name] for name in vars(run.state).keys() & saved.keys()}
        run.state = RunState(**known)
        run.state.postponed = saved.get("postponed", ["Evaluations"])  # 0.6 has only val_loss
        run.state.changes += run.changes.values()
        run.guard.recent = saved["recent"]
        run.guard.bad_in_a_row = saved.get("bad_in_a_row", 0)
        seen = tokens // config.tokens_per_sequence
        run.schedule = config.batch_schedule(run.accelerator.num_processes, run.step, seen)
    run.training_state.load_optimizer(checkpoint, saved)
    with all_or_none():
        run.training_state.load_callbacks(checkpoint, saved, config.ignore_changes)
    run.accelerator.print(f"resumed from {checkpoint}")
    run.resumes_here = checkpoint.resolve().parent == run.run_dir.resolve()
    if run.resumes_here and not run.state.postponed:  # else it is saved with their results
        run.saved_step = run.step
    if not run.resumes_here and (checkpoint.parent / "run.json").exists():
        run.state.run_id = ""  # a branch of another run is a run of its own


def collect(run: Run) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Returns the tensors of each file in `training_state/`, and the content of `state.json`.

    `position` is the number of sequences read. Gathers nothing. Raises `ValueError` for what a
    checkpoint cannot hold.
    """
    tensors, values = run.training_state.collect()
    loader = run.train_loader
    state = asdict(run.state) | order_of(run) | values
    state |= {
        "position": {"sequences": run.schedule.first(run.step)},
        "settings": run.config.settings(),
        "parts": run.parts,
        "recent": run.guard.recent,
        "bad_in_a_row": run.guard.bad_in_a_row,
        "bos": loader.bos,
        "phases": [start for start, _ in loader.phases],
        "micro_batch": {
            "size": loader.micro_batch_size,
            "processes": run.accelerator.num_processes,
        },
        "version": __version__,
    }
    check_json(state, "state")
    return tensors, deepcopy(state)  # later changes of its values do not reach it


def save_due(run: Run) -> bool:
    """Whether a checkpoint is due at this step.

    None is due after a skipped update: if the run diverges, the newest checkpoint precedes the bad
    updates.
    """
    if not goes_on(run):
        return not diverged(run)
    due = run.save_requested or run.due(run.config.save_every)
    return due and run.guard.bad_in_a_row == 0


def save(run: Run) -> None:
    """Starts to write the checkpoint of this step, after the previous one is written.

    Does nothing if this step's is written already. Raises `OSError` if the run's folder is gone.
    """
    run.wants_save = False
    problem = end_write(run)
    if run.step == run.saved_step and not problem:
        return
    metrics = run.run_dir / "metrics.jsonl"
    if run.accelerator.is_main_process and metrics.exists():
        sync(metrics)  # a resumed run does not repeat this step
    with evaluating_optimizer(run.optimizer):
        trained = bool(run.config.lora)
        model = full_model(run.accelerator, run.model, run.empty, trained)
        parts, state = collect(run)
        tensors = {name: gather_to_host(run.accelerator, part) for name, part in parts.items()}
    if model is not None:
        run.writer.save(model, tensors, state, describe_training(run))
    run.saved_step = run.step


def end_write(run: Run) -> str:
    """Waits for the previous checkpoint, and reports it if no update has.

    Returns why it could not be written, or an empty text. Raises `OSError` if the run's folder is
    gone.
    """

    def wait() -> tuple[str, bool]:
        run.status.write()
        if run.status.lost:
            raise OSError(
                f"{run.config.output_dir} was removed or moved during the run, or another process "
                "trains there now: put it back and start the same command again, or choose "
                "another --output_dir"
            )
        return run.writer.join(), run.writer.written is not None

    problem, written = on_main_process(wait)
    if written:
        report_save(run)
    return problem


def report_save(run: Run) -> None:
    """Calls `on_save` of the callbacks for the checkpoint that is written."""
    run.writer.written = None
    call(run, "on_save", path=run.run_dir / f"checkpoint-{run.saved_step}")


def check_problems(run: Run) -> None:
    """Raises a rank's problem on all ranks: `UnreadableData`, or an error of a save."""
    with all_or_none():
        problem = run.writer.bug or run.train_loader.problem
        if problem is not None:
            raise problem
