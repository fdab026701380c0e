"""What follows the loop: the last checkpoint, the final model, and the push to the Hub."""

from pathlib import Path

import torch
from accelerate import Accelerator

from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.checkpoint.state_dict import full_model
from gpt2_accel.config import TrainConfig
from gpt2_accel.files import first_line
from gpt2_accel.hf.convert import save_pretrained
from gpt2_accel.hf.hub import PICTURE
from gpt2_accel.hf.uploads import Uploads
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.report.figures import draw_loss
from gpt2_accel.runtime.context import RunContext, start_uploads
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.metadata import end_summary
from gpt2_accel.runtime.processes import on_main_process
from gpt2_accel.runtime.setup import TrainInputs
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.runtime.state import TrainState


def finish(run: RunContext) -> bool:
    """Saves the last checkpoint and, if the run is complete, the final model. Returns whether it is complete.

    Raises `Diverged` if the run has diverged, `UnreadableData` if the data could not be read.
    """
    config, state = run.config, run.state
    if run.diverged:
        save_before_divergence(run)
    run.check_data()
    run.save()
    run.wait_for_checkpoint()
    run.log.print_line(end_summary(run.log, run.metadata.prediction))
    converged = state.early_stopping.ended
    if converged:
        run.log.print_line(
            f"early stopping: no lower validation loss in {config.patience} evaluations"
        )
    unevaluated = run.stopping and any(every for every, _ in run.inputs.evaluations)
    finished = converged or (state.step >= run.inputs.updates and not unevaluated)
    if finished:
        export_model(run)
    else:
        run.stopped(run.stop.reason or "a signal to another process")
    return finished


def save_before_divergence(run: RunContext) -> None:
    """Saves a checkpoint of the step before the bad updates, which do not change the weights, and raises `Diverged`."""
    state, bad = run.state, run.state.guard.bad_in_a_row
    state.step -= bad
    run.save()
    run.wait_for_checkpoint()
    raise Diverged(
        f"{bad} updates in a row were skipped, the last because {run.problem}: resume from checkpoint-"
        f"{state.step} or an earlier one with a lower --learning_rate, or look at the samples listed in "
        f"{run.config.output_dir}/metrics.jsonl"
    )


def export_model(run: RunContext) -> None:
    """Writes the final model into the run's folder, marks the run as finished, and pushes it if `push_to_hub` is set.

    Raises `OSError` if the model cannot be written.
    """
    config, accelerator = run.config, run.accelerator
    plain = full_model(accelerator, run.state.model)
    if accelerator.is_main_process:
        check_weights(plain)
        try:
            save_pretrained(plain, config.output_dir, run.inputs.tokenizer, training=run.describe())
        except Exception as error:
            if not (isinstance(error, OSError) or "os error" in str(error)):  # raised by tokenizers
                raise
            raise OSError(
                f"the final model could not be written to {config.output_dir} ({first_line(error)}): free "
                "space or make it writable, then continue from the last checkpoint with --resume_from latest"
            ) from error
    run.finished()
    if accelerator.is_main_process and config.push_to_hub:
        try:
            draw_loss(config.output_dir, f"{config.output_dir}/{PICTURE}")
        except OSError as error:
            run.log.print_line(f"the loss is not plotted: {first_line(error)}")
        push_final(config, run.uploads, run.inputs)


def check_weights(model: LanguageModel) -> None:
    """Raises `Diverged` if the logits of a few tokens are NaN or infinite. They are if a weight is, or far too large."""
    tokens = torch.arange(min(16, model.config.n_positions, model.config.vocab_size))
    with evaluating(model), torch.no_grad():
        finite = model(tokens[None]).isfinite().all()
    if not finite:
        raise Diverged(
            "the run has diverged, its logits are NaN or infinite: resume from an earlier checkpoint with a lower "
            "--learning_rate, or start again with it"
        )


def push_final(config: TrainConfig, uploads: Uploads, inputs: TrainInputs) -> None:
    """Starts the upload of the final model in the run's folder."""
    newest = (list_checkpoints(config.output_dir) or [inputs.checkpoint])[-1]
    uploads.push(Path(config.output_dir), newest, final=True)


def is_complete(
    config: TrainConfig, accelerator: Accelerator, state: TrainState, inputs: TrainInputs
) -> bool:
    """Whether the run in `config.output_dir` is finished at this step and its final model is written. Says so, and
    pushes the model if `push_to_hub` is set; the Hub's client sends only changed files."""
    if state.step < inputs.updates and not state.early_stopping.ended:
        return False
    complete = on_main_process(accelerator, lambda: has_final_model(config, state, inputs))
    prefix = f"{config.output_dir} is complete: " if complete else ""
    accelerator.print(prefix + nothing_left(config, state))
    if complete and config.push_to_hub and accelerator.is_main_process:
        with (
            StopRequest() as stop,
            start_uploads(config, accelerator, accelerator.print, stop) as uploads,
        ):
            push_final(config, uploads, inputs)
    return complete


def has_final_model(config: TrainConfig, state: TrainState, inputs: TrainInputs) -> bool:
    """Whether the run's folder has the final model of this step, and the run's status says that it is finished."""
    run_dir = Path(config.output_dir).resolve()
    status = read_status(run_dir)
    return (
        inputs.checkpoint is not None
        and inputs.checkpoint.resolve().parent == run_dir
        and (status.get("state"), status.get("step")) == ("finished", state.step)
        and any(run_dir.glob("model*.safetensors"))
    )


def nothing_left(config: TrainConfig, state: TrainState) -> str:
    """Says why a resumed run has no update left to do."""
    if state.early_stopping.ended:
        return "nothing left to train, early stopping has ended it"
    seen = state.schedule.first(state.step) * config.tokens_per_sequence
    planned = config.max_steps * config.total_batch_size
    return (
        f"nothing left to train: {state.step:,} updates have read {seen:,} tokens, and max_steps x total_batch_size = "
        f"{config.max_steps:,} x {config.total_batch_size:,} = {planned:,}; raise --max_steps to go on"
    )
