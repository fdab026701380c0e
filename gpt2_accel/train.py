"""The training loop: `train` builds a run, `run_updates` trains it, `finish` ends it.

Read next: `run.py`, what a run is; `callbacks.py`, what happens between updates, such as
evaluations and checkpoints; `setup.py`, which builds all parts; `lifecycle.py`, the start and the
end of a run.
"""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch
from gpt2_accel.data.order import hash64
from gpt2_accel.data.source import Data
from gpt2_accel.estimate.dry_run import estimate_run
from gpt2_accel.first_model import NewModel
from gpt2_accel.lifecycle import closing, finish, is_complete, lock_run_dir, started
from gpt2_accel.models import LanguageModel
from gpt2_accel.optim import build_optimizer, learning_rate, set_learning_rate, set_training
from gpt2_accel.run import (
    Gradients,
    Interrupted,
    Loss,
    MicroBatches,
    Objective,
    Run,
    call,
    goes_on,
    must_stop,
)
from gpt2_accel.runtime.accelerator import (
    build_accelerator,
    clip_gradients,
    close,
    gradients_of,
)
from gpt2_accel.runtime.device import full_tensor, seed_generators
from gpt2_accel.runtime.processes import on_main_process
from gpt2_accel.runtime.signals import is_first, lasting_output
from gpt2_accel.saving import check_problems, report_save
from gpt2_accel.setup import find_data, setup

RESERVED = {"grad_norm", "learning_rate", "step"}  # figures that the loop adds


def next_token_loss(model: torch.nn.Module, batch: Batch) -> Loss:
    """The default objective: the mean cross-entropy of the batch's targets in nats, a scalar.

    A mixture of experts adds its load balancing loss, which is also returned as a figure.
    """
    result = model(batch.input_ids, batch.targets, documents=batch.documents)
    if isinstance(result, tuple):
        loss, aux_loss = result
        return loss, {"aux_loss": aux_loss}
    return result


def train(
    config: TrainConfig,
    *,
    data: "Data | Callable[[Any], Data] | None" = None,
    model: torch.nn.Module | NewModel | None = None,
    objective: Objective = next_token_loss,
    gradients: "Gradients | None" = None,
    optimizer: Callable[[LanguageModel, TrainConfig], torch.optim.Optimizer] = build_optimizer,
    callbacks: Iterable[Any] = (),
) -> bool:
    """Trains a model with the settings of `config`.

    Hardware and precision come from the Accelerate config. Checkpoints, logs and the final model,
    an HF directory, go to `config.output_dir`. All ranks call it.

    Parts that can be replaced:
    - `data`: a `Data`, or a function of the settings that returns one; by default `data_dir`;
    - `model`: a module with the attributes that docs/change.md lists, or a function that builds
      one from the settings and the data's tokenizer;
    - `objective`: a function of the prepared model, which it must call, and a micro-batch. It
      returns the loss, or a pair of the loss and figures to log, all means over counted targets;
    - `gradients`: a function of the run and the micro-batches of an update, which leaves gradients
      in the parameters and returns figures; by default `accumulate_gradients`;
    - `optimizer`: a function of the model, not yet prepared, and the settings;
    - `callbacks`: objects with methods of `callbacks.Callback`.

    Returns whether the run is complete. It is not if a signal or `max_hours` stopped it, or with
    `dry_run`, which trains nothing.

    Raises `ValueError` or `OSError` before training if settings or data cannot work, and
    `Diverged`, a `ValueError`, if the run diverges.
    """
    if config.dry_run:
        if is_first("RANK"):
            print(estimate_run(config, data and find_data(config, data)))
        return False
    with lasting_output():
        accelerator = build_accelerator(config.deterministic)
        with lock_run_dir(config):
            run = setup(
                config,
                accelerator,
                data,
                model,
                objective,
                gradients or accumulate_gradients,
                optimizer,
                callbacks,
            )
            finished = is_complete(run)
            if not finished:
                with started(run):
                    run_updates(run)
                    finished = finish(run)
            if finished and accelerator.is_main_process:
                print(closing(run))
        close(accelerator)
    return finished


def run_updates(run: Run) -> None:
    """Trains until the last update, early stopping, divergence, or a request to stop."""
    config = run.config
    accelerator = run.accelerator
    schedule = run.schedule
    model = run.model
    optimizer = run.optimizer
    model.train()
    set_training(optimizer, True)
    while goes_on(run):
        # Learning rate, data order and dropout seed are functions of the step, so they have no
        # state to resume.
        first = schedule.first(run.step)  # the position of the update's first sequence in the data
        lr = learning_rate(config, first / schedule.full)
        set_learning_rate(optimizer, lr, config.learning_rate)
        seed = int(hash64(config.seed, run.step, accelerator.process_index)[0])
        seed_generators(accelerator.device, seed)
        batches, count = run.loader.update(first, schedule.sequences(run.step))
        try:
            totals = run.gradients(run, MicroBatches(batches, count, run.interrupted))
        except Interrupted:  # the unfinished update is dropped
            break
        grad_norm = clip_gradients(accelerator, model, config.max_grad_norm)
        if not run.reduced:
            raise ValueError(
                "the gradients of the update are not reduced over the processes: give the last "
                "run.backward of a pass last=True"
            )
        figures = reduce_figures(run, totals, grad_norm)  # the host waits for the device here
        scaled = accelerator.scaler is not None  # fp16
        problem = run.guard.check(figures["loss"], figures["grad_norm"], scaled=scaled)
        if problem is None:
            call(run, "on_pre_optimizer_step")
            gradients_of(model)  # raises if there are none
            optimizer.step()
        elif scaled:
            accelerator.scaler.update()
        optimizer.zero_grad()
        figures["learning_rate"] = lr
        end_update(run, figures, problem)


def accumulate_gradients(run: Run, batches: MicroBatches) -> dict[str, torch.Tensor]:
    """Runs forward and backward on this rank's micro-batches of one update.

    Returns this rank's loss and other figures, scalars; their means over the ranks are the figures
    of the update. Gradients are reduced over the ranks in the last backward pass only.
    """
    totals: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        result = run.objective(run.model, batch)
        loss, others = result if isinstance(result, tuple) else (result, {})
        run.backward(loss / batch.divisor, last=number == len(batches))
        figures = {"loss": loss} | others
        if "loss" in others or (number > 1 and totals.keys() != figures.keys()):
            raise ValueError(
                f"the objective returns the figures {sorted(others)}, first {sorted(totals)}: "
                "return the same for each batch, none as loss"
            )
        for name, value in figures.items():
            mean = torch.as_tensor(value).detach().float() / batch.divisor
            totals[name] = totals.get(name, 0.0) + mean
    return totals


def reduce_figures(
    run: Run, figures: dict[str, torch.Tensor], grad_norm: torch.Tensor
) -> dict[str, float]:
    """Returns the means of the figures over all ranks, and `grad_norm`.

    Also finds out whether a rank has to stop, ends the run as complete or wants a checkpoint. The
    host waits here until the device has done the update. Raises what a rank's read or save has
    raised: an update must not train on tokens that a rank could not read. Raises `ValueError` if
    the figures are not those of the main process's first update, or have a reserved name.
    """
    if not isinstance(figures, dict) or "loss" not in figures:
        raise ValueError(
            f"the gradients return {figures!r}: return a dict of scalars that has loss"
        )
    names = sorted(figures)
    if run.figure_names is None:
        run.figure_names = on_main_process(lambda: names)
    if names != run.figure_names or RESERVED & {*names}:
        raise ValueError(
            f"an update has the figures {names}, the first had {run.figure_names}: return the same "
            f"each time, and none of {', '.join(sorted(RESERVED))}"
        )
    device = run.accelerator.device
    flags = (
        must_stop(run),
        run.updates <= run.state.finish,
        run.wants_save,
        run.writer.written is not None,
    )
    # Filled on the device: a copy from the host would be another wait.
    values = [torch.full((), float(flag), device=device) for flag in flags]
    values += [torch.as_tensor(figures[name]).to(device, torch.float32) for name in names]
    means = run.accelerator.reduce(torch.stack(values), "mean")
    together = torch.cat((means, full_tensor(grad_norm)[None]))
    stop, finish, save, written, *reduced, norm = together.tolist()
    run.stopping = stop > 0
    run.state.finishing = finish > 0
    if run.state.finishing:
        run.state.finish = run.updates
    run.save_requested = save > 0
    run.unreported = written > 0
    if run.stopping:
        check_problems(run)
    return dict(zip(names, reduced, strict=True)) | {"grad_norm": norm}


def end_update(run: Run, figures: dict[str, float], problem: str | None) -> None:
    """Counts an update and calls the callbacks. `problem` is why it was skipped, or None."""
    update = run.step
    run.state.step += 1
    run.state.val_loss = None
    run.figures = figures
    run.log.advance(run.step)
    if problem is not None:
        run.problem = problem
        first = run.schedule.first(update)
        samples = run.train_loader.samples(first, run.schedule.sequences(update))
        run.log.skipped(problem, samples.tolist())
    if run.unreported:
        report_save(run)
    call(run, "on_step_end", skipped=problem is not None)
    if run.due(run.config.log_every):
        gc.collect(1)  # the young objects, on all ranks at once
    run.log.resume()
