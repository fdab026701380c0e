"""The training loop. Read `train` from top to bottom; the other functions are its steps."""

import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator

from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.checkpoint.state_dict import full_model, full_tensor, unwrap
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import TrainLoader, hash64
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.device import is_sharded
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.estimate.law import follow_law
from gpt2_accel.files import first_line
from gpt2_accel.generation.sampling import Sampling, complete, whole_text
from gpt2_accel.hf.convert import save_pretrained
from gpt2_accel.hf.hub import PICTURE, check_login, check_repo_id
from gpt2_accel.hf.uploads import Uploads
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.optim import learning_rate, set_learning_rate
from gpt2_accel.report.figures import draw_loss
from gpt2_accel.runtime.accelerator import build_accelerator, close
from gpt2_accel.runtime.checks import check_same_settings
from gpt2_accel.runtime.context import RunContext, lock_run_dir, start_uploads
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.metadata import end_summary
from gpt2_accel.runtime.processes import AnyRank, main_process_first, on_main_process
from gpt2_accel.runtime.progress import lasting_output
from gpt2_accel.runtime.setup import TrainInputs, setup
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.runtime.state import TrainState
from gpt2_accel.runtime.trackers import check_trackers


def train(config: TrainConfig) -> bool:
    """Trains a model with the settings of `config`, on the hardware and in the precision of the Accelerate config.

    Writes checkpoints, logs and the final model, an HF directory, into `config.output_dir`. All ranks call it.

    Returns whether the run is complete. It is not if a signal or `max_hours` ends it with a checkpoint, and with
    `dry_run` and `eval_only`, which train nothing.

    Raises `ValueError` or `OSError` for settings or data that cannot work, before training, and `Diverged`, a
    `ValueError`, if the run diverges.
    """
    if config.push_to_hub:
        check_repo_id(config.push_to_hub)
    config = follow_law(config)
    if config.dry_run:  # needs no Accelerator: the planned hardware may be another machine's
        if int(os.environ.get("RANK", 0)) == 0:
            print(dry_run(config))
        return False
    check_trackers(config.report_to)
    with lasting_output():
        accelerator = build_accelerator(config.deterministic, config.gather_fp32)
        check_same_settings(config, accelerator)
        if config.push_to_hub:
            on_main_process(accelerator, check_login)
        with lock_run_dir(config, accelerator):
            finished = train_or_evaluate(config, accelerator)
        close(accelerator)
    return finished


def train_or_evaluate(config: TrainConfig, accelerator: Accelerator) -> bool:
    """Builds the run and trains it, with `eval_only` evaluates it. Returns what `train` returns."""
    state, inputs = setup(config, accelerator)
    if config.eval_only:
        if inputs.checkpoint is None and not config.init_from:
            raise FileNotFoundError(
                f"{config.output_dir} holds no checkpoint to evaluate: give the --output_dir of a run, or --init_from"
            )
        for _, evaluate in inputs.evaluations:
            accelerator.print(json.dumps(evaluate(accelerator, state.model)))
        return False
    if on_main_process(accelerator, lambda: is_complete(config, state, inputs)):
        accelerator.print(f"{config.output_dir} is complete: {nothing_left(config, state)}")
        if config.push_to_hub and accelerator.is_main_process:
            push_complete(config, accelerator, inputs)
        return True
    if state.step >= inputs.updates:
        accelerator.print(nothing_left(config, state))
    with RunContext(config, accelerator, state, inputs) as run:
        return run_updates(run)


def run_updates(run: RunContext) -> bool:
    """Trains, evaluates and saves until the run is complete or has to stop. Returns whether it is complete."""
    config, accelerator, state, inputs = run.config, run.accelerator, run.state, run.inputs
    model, optimizer, schedule, loader = state.model, state.optimizer, state.schedule, inputs.loader
    interrupted = AnyRank(accelerator, lambda: must_stop(run))
    stopping = diverged = save_due = False
    converged = state.early_stopping.ended  # before a resume
    if run.unevaluated:  # the metrics of the last update lack an evaluation
        stopping, ended = evaluate_due(run, interrupted)
        converged |= ended
        run.log.end_step()
    model.train()
    while state.step < inputs.updates and not (stopping or diverged or converged):
        # Learning rate, data order and dropout seed are functions of the step, so they have no state to resume.
        first, sequences = schedule.first(state.step), schedule.sequences(state.step)
        lr = learning_rate(
            first / schedule.full,
            peak=config.learning_rate,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            max_steps=config.max_steps,
            min_ratio=config.min_lr_ratio,
            decay_share=config.decay_share,
        )
        set_learning_rate(optimizer, lr)
        torch.manual_seed(int(hash64(config.seed, state.step, accelerator.process_index)[0]))
        with run.update():
            loss = accumulate_gradients(
                accelerator, model, run.loader, first, sequences, interrupted
            )
            if loss is None:  # a rank has to stop: the unfinished update is dropped
                break
            grad_norm = accelerator.clip_grad_norm_(
                model.parameters(), config.max_grad_norm or math.inf
            )
            loss, grad_norm, stopping = reduce_step_stats(
                accelerator, must_stop(run), loss, grad_norm
            )
            if stopping:
                run.check_data()  # tokens that could not be read are in no update
            problem = state.guard.check(loss, grad_norm, scaled=accelerator.scaler is not None)
            if problem is None:
                optimizer.step()
            elif accelerator.scaler is not None:
                accelerator.scaler.update()
            optimizer.zero_grad()
        state.step = step = state.step + 1

        run.log.advance(step)
        if problem is not None:
            run.log.skipped(problem, loader.samples(first, sequences))
            diverged = state.guard.bad_in_a_row == config.max_bad_steps
        elif step == 1 or due(config.log_every, step, inputs.updates):
            run.log.training({"loss": loss, "grad_norm": grad_norm, "learning_rate": lr})
        if not stopping:
            stopping, ended = evaluate_due(run, interrupted)
            converged |= ended
        if due(config.sample_every, step, inputs.updates) and not stopping:
            write_samples(run)
        last = stopping or converged or step == inputs.updates
        # A checkpoint waits for a good update: if the run diverges, the newest precedes the bad updates.
        save_due |= due(config.save_every, step, inputs.updates)
        if (last or (save_due and problem is None)) and not diverged:
            run.save()
            save_due = False
        run.log.end_step()
        run.profile.step()

    if diverged:
        save_before_divergence(run, problem)
    run.check_data()
    run.save()
    run.wait_for_checkpoint()
    run.log.print_line(end_summary(run.log, run.metadata.prediction))
    if converged:
        run.log.print_line(
            f"early stopping: no lower validation loss in {config.patience} evaluations"
        )
    unevaluated = stopping and any(every for every, _ in inputs.evaluations)
    finished = converged or (state.step >= inputs.updates and not unevaluated)
    if finished:
        export_model(run)
    else:
        run.stopped(run.stop.reason or "a signal to another process")
    return finished


def evaluate_due(run: RunContext, interrupted: Callable[[], bool]) -> tuple[bool, bool]:
    """Runs and logs the evaluations that are due at this step, until one is interrupted.

    Returns whether one was, and whether early stopping ends the run.
    """
    state, stopping, converged = run.state, False, False
    for every, evaluate in run.inputs.evaluations:
        if due(every, state.step, run.inputs.updates) and not stopping:
            results = evaluate(run.accelerator, state.model, interrupted)
            stopping = not results
            run.log.evaluation(results)
            check_results(results)
            converged |= state.early_stopping.exhausted(results.get("val/loss"), state.step)
    return stopping, converged


def must_stop(run: RunContext) -> bool:
    """Whether this rank has to stop: after a signal, or because its data cannot be read."""
    return run.stop.reason is not None or run.inputs.loader.problem is not None


def accumulate_gradients(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: TrainLoader | PrefetchLoader,
    first: int,
    sequences: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> torch.Tensor | None:
    """Runs forward and backward on this rank's share of one update: `sequences` sequences from position `first`.

    Returns this rank's part of the loss, a scalar, whose mean over the ranks is the mean over the update's counted
    targets. Ranks reduce the gradients in the last backward only. `interrupted` is called between micro-batches and must
    agree on all ranks; if True, returns None.
    """
    _, count = loader.micro_batches(sequences)
    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(loader.update(first, sequences), start=1):
        if number > 1 and interrupted():
            return None
        with nullcontext() if number == count else accelerator.no_sync(model):
            loss = model(batch.input_ids, batch.targets, documents=batch.documents) / batch.divisor
            accelerator.backward(loss)
        total += loss.detach()
    return total


def reduce_step_stats(
    accelerator: Accelerator, must_stop: bool, loss: torch.Tensor, grad_norm: torch.Tensor
) -> tuple[float, float, bool]:
    """Returns the mean loss over all ranks, the gradient norm, and whether any rank has to stop.

    The host waits here until the device has done the update.
    """
    flag = torch.full_like(loss, float(must_stop))
    mean_loss, flags = accelerator.reduce(torch.stack((loss, flag)), "mean")
    stats = torch.stack((mean_loss, full_tensor(grad_norm), flags))
    loss_value, norm_value, flag_value = stats.tolist()
    return loss_value, norm_value, flag_value > 0


def check_results(results: dict[str, float]) -> None:
    """Raises `Diverged` if the validation loss is NaN or infinite."""
    if not math.isfinite(loss := results.get("val/loss", 0.0)):
        raise Diverged(
            f"the run has diverged, val/loss is {loss}: resume from an earlier checkpoint with a lower --learning_rate, or "
            "start again with it"
        )


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


def is_complete(config: TrainConfig, state: TrainState, inputs: TrainInputs) -> bool:
    """Whether the run in `config.output_dir` is finished at this step and its final model is written."""
    ended = state.step >= inputs.updates or state.early_stopping.ended
    if not ended or inputs.checkpoint is None:
        return False
    run_dir = Path(config.output_dir).resolve()
    status = read_status(run_dir)
    finished = status.get("state") == "finished" and status.get("step") == state.step
    finished &= any(run_dir.glob("model*.safetensors"))
    return finished and inputs.checkpoint.resolve().parent == run_dir


def write_samples(run: RunContext) -> None:
    """Generates a sample from each of `config.sample_prompts`, on the main process only, uncompiled, in fp32.

    A sharded model is gathered to the main process's device: generation on the CPU would keep the others waiting.
    """
    config, accelerator, model = run.config, run.accelerator, run.state.model
    tokenizer = run.inputs.tokenizer
    plain = full_model(accelerator, model) if is_sharded(model) else unwrap(accelerator, model)
    with main_process_first():  # may exceed the time limit of a collective
        if accelerator.is_main_process:
            plain = plain.to(accelerator.device)
            sampling = Sampling(max_new_tokens=config.sample_tokens, seed=config.seed)
            samples = complete(plain, tokenizer, run.inputs.prompts, sampling)
            for prompt, sample in zip(config.sample_prompts, samples, strict=True):
                run.log.sample(prompt, whole_text(tokenizer, sample))


def save_before_divergence(run: RunContext, problem: str) -> None:
    """Saves a checkpoint of the step before the bad updates, which do not change the weights, and raises `Diverged`."""
    state, bad = run.state, run.state.guard.bad_in_a_row
    state.step -= bad
    run.save()
    run.wait_for_checkpoint()
    raise Diverged(
        f"{bad} updates in a row were skipped, the last because {problem}: resume from checkpoint-"
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


def push_final(config: TrainConfig, uploads: Uploads, inputs: TrainInputs) -> None:
    """Starts the upload of the final model in the run's folder."""
    newest = (list_checkpoints(config.output_dir) or [inputs.checkpoint])[-1]
    uploads.push(Path(config.output_dir), newest, final=True)


def push_complete(config: TrainConfig, accelerator: Accelerator, inputs: TrainInputs) -> None:
    """Pushes a complete run to the Hub, without changing the run's folder. The client sends only changed files."""
    with (
        StopRequest() as stop,
        start_uploads(config, accelerator, accelerator.print, stop) as uploads,
    ):
        push_final(config, uploads, inputs)


def due(every: int, step: int, updates: int) -> bool:
    """Whether an action of every `every` updates, and of the last, is due at `step`. 0 means never."""
    return every > 0 and (step % every == 0 or step == updates)
