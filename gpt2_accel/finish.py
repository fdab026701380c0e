"""What follows the loop: the last checkpoint, the final model, and the push to the Hub."""

from pathlib import Path

from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.checkpoint.state_dict import full_model
from gpt2_accel.checkpoint.writer import write_manifest
from gpt2_accel.config import load_saved
from gpt2_accel.files import sentence
from gpt2_accel.hf.convert import check_finite, save_pretrained
from gpt2_accel.hf.hub import MODEL_MANIFEST, PICTURE
from gpt2_accel.hf.safetensors_files import WEIGHTS
from gpt2_accel.report.figures import draw_loss
from gpt2_accel.runtime import signals
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.metadata import changed_settings, describe_training, end_summary
from gpt2_accel.runtime.processes import on_main_process
from gpt2_accel.runtime.run import Run


def finish(run: Run) -> bool:
    """Saves the last checkpoint and, if the run is complete, the final model. Returns whether it is complete.

    Raises `Diverged` if the run has diverged, and the errors of `Run.check_problems`.
    """
    config = run.config
    bad = run.guard.bad_in_a_row
    if run.diverged:
        run.step -= bad  # the bad updates did not change the weights
    else:
        run.check_problems()
    run.save()
    on_main_process(lambda: wait_for_checkpoint(run))
    if run.diverged:
        raise Diverged(
            f"{bad} updates in a row were skipped, the last because {run.problem}: resume from checkpoint-"
            f"{run.step} or an earlier one with a lower --learning_rate, or look at the samples listed in "
            f"{config.output_dir}/metrics.jsonl"
        )
    run.log.print_line(end_summary(run))
    if run.early_stopping.ended:
        run.log.print_line(
            f"early stopping: no lower validation loss in {config.patience} evaluations"
        )
    elif run.step < run.updates or (run.stopping and run.evaluations):
        reason = run.stop.reason or "a signal to another process"
        if run.status is not None:
            run.status.end("stopped", reason, requeue=reason != "SIGINT")
        signals.exit_code = run.stop.exit_code
        run.log.print_line(f"stopped ({reason}); continue with --resume_from latest")
        return False
    export_model(run)
    return True


def wait_for_checkpoint(run: Run) -> None:
    """Waits until the last checkpoint is on disk. Raises `OSError` if it could not be written."""
    if error := run.writer.join():
        message = f"the last checkpoint could not be written: {sentence(error)}"
        raise OSError(message) from error


def export_model(run: Run) -> None:
    """Writes the final model into the run's folder, marks the run as finished, and pushes it if `push_to_hub` is set.

    Raises `OSError` if the model cannot be written, `ValueError` if its weights are not finite.
    """
    config, folder = run.config, Path(run.config.output_dir)
    plain = full_model(run.accelerator, run.model)
    if plain is None:  # not the main process
        return
    check_finite(plain, f"the model after update {run.step}")
    training = describe_training(run)
    try:
        save_pretrained(plain, folder, run.tokenizer, training=training)
        write_manifest(folder, MODEL_MANIFEST, (WEIGHTS, "config.json", "tokenizer.json"))
    except OSError as error:
        raise OSError(
            f"the final model could not be written to {folder} ({sentence(error)}): free "
            "space or make it writable, then continue from the last checkpoint with --resume_from latest"
        ) from error
    # Before the status: a complete run that is started again removes nothing.
    run.writer.rotate(run.step)
    run.status.end("finished")
    if config.push_to_hub:
        try:
            draw_loss(config.output_dir, folder / PICTURE)
        except (OSError, ValueError) as error:
            run.log.print_line(f"the loss is not plotted: {sentence(error)}")
        newest = list_checkpoints(folder)[-1]
        run.uploads.push(folder, newest)


def is_complete(run: Run) -> bool:
    """Whether the run is finished at this step and its final model is written. Prints that no update
    is left to do.

    Raises `ValueError` if settings were given that the complete run does not have."""
    run_dir = Path(run.config.output_dir)
    status, has_model = on_main_process(
        lambda: (read_status(run_dir), any(run_dir.glob("model*.safetensors")))
    )
    found = status.get("state"), status.get("step")
    if run.goes_on() or not (run.resumes_here and has_model and found == ("finished", run.step)):
        return False
    text = (
        f"{run_dir} is complete: nothing left to train after {run.step:,} updates: raise --max_steps, "
        "--epochs or --patience to go on"
    )
    changes = on_main_process(
        lambda: changed_settings(run.config, load_saved(run_dir / "config.yaml"), run.step)
    )
    unused = [change for name, change in changes.items() if name in run.config.given]
    if unused:
        raise ValueError(
            f"{text}, or choose another --output_dir: {', '.join(unused)} was not used"
        )
    run.accelerator.print(text)
    return True
