"""The training loop: `train` builds a run, `run_updates` trains it, `finish` ends it.

`run.py` has what a run is, `callbacks.py` what happens between updates, such as evaluations and checkpoints, `setup.py`
builds all parts. `lifecycle.py` has the start and the end of a run.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch, hash64
from gpt2_accel.first_model import NewModel
from gpt2_accel.lifecycle import finish, is_complete, lock_run_dir, started
from gpt2_accel.models import LanguageModel
from gpt2_accel.optim import set_learning_rate, set_training
from gpt2_accel.run import Objective, Run
from gpt2_accel.runtime.accelerator import build_accelerator, close
from gpt2_accel.runtime.device import seed_generators
from gpt2_accel.runtime.signals import lasting_output
from gpt2_accel.setup import is_dry_run, setup


def next_token_loss(
    model: torch.nn.Module, batch: Batch
) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The default objective: the mean cross-entropy of the batch's targets in nats, a scalar. A mixture of experts adds its load
    balancing loss, which is also a figure."""
    found = model(batch.input_ids, batch.targets, documents=batch.documents)
    return (found[0], {"aux_loss": found[1]}) if isinstance(found, tuple) else found


def train(
    config: TrainConfig,
    *,
    model: torch.nn.Module | NewModel | None = None,
    objective: Objective = next_token_loss,
    optimizer: Callable[[LanguageModel, TrainConfig], torch.optim.Optimizer] | None = None,
    callbacks: Sequence[Any] = (),
) -> bool:
    """Trains a model with the settings of `config`, on the hardware and in the precision of the Accelerate config.

    Writes checkpoints, logs and the final model, an HF directory, into `config.output_dir`. All ranks call it.

    What may be replaced: `model`, a module with what `models.Trainable` lists, or a function of the settings and the data's tokenizer; `objective`, which gets
    the prepared model, which it must call, and a micro-batch, and returns its loss, or its loss and figures to log (both
    are means over the counted targets); `optimizer`, a function of the model, not yet prepared, and the settings;
    `callbacks`, objects with methods of `callbacks.Callback`.

    Returns whether the run is complete. It is not if a signal or `max_hours` ends it with a checkpoint, and with
    `dry_run`, which trains nothing.

    Raises `ValueError` or `OSError` for settings or data that cannot work, before training, and `Diverged`, a
    `ValueError`, if the run diverges.
    """
    if is_dry_run(config):
        return False
    with lasting_output():
        accelerator = build_accelerator(config.deterministic)
        with lock_run_dir(config):
            run = setup(config, accelerator, model, objective, optimizer, callbacks)
            finished = is_complete(run)
            if not finished:
                with started(run):
                    run_updates(run)
                    finished = finish(run)
        close(accelerator)
    return finished


def run_updates(run: Run) -> None:
    """Trains until the last update, until early stopping or divergence ends the run, or until it has to stop."""
    config, accelerator, schedule = run.config, run.accelerator, run.schedule
    model, optimizer = run.model, run.optimizer
    model.train()
    set_training(optimizer, True)
    while run.goes_on():
        # Learning rate, data order and dropout seed are functions of the step, so they have no state to resume.
        first, sequences = schedule.first(run.step), schedule.sequences(run.step)  # of the data
        lr = config.learning_rate_at(first / schedule.full)
        set_learning_rate(optimizer, lr, config.learning_rate)
        seed = int(hash64(config.seed, run.step, accelerator.process_index)[0])
        seed_generators(accelerator.device, seed)
        totals = accumulate_gradients(run, first, sequences)
        if totals is None:  # a rank has to stop: the unfinished update is dropped
            break
        grad_norm = accelerator.clip_grad_norm_(
            model.parameters(), config.max_grad_norm or math.inf
        )
        figures = run.reduce(totals, grad_norm)  # the host waits for the device here
        scaled = accelerator.scaler is not None  # fp16
        problem = run.guard.check(figures["loss"], figures["grad_norm"], scaled=scaled)
        if problem is None:
            run.call("on_pre_optimizer_step")
            optimizer.step()
        elif scaled:
            accelerator.scaler.update()
        optimizer.zero_grad()
        run.end_update({**figures, "learning_rate": lr}, problem)


def accumulate_gradients(run: Run, first: int, sequences: int) -> dict[str, torch.Tensor] | None:
    """Runs forward and backward on this rank's share of one update: `sequences` sequences from position `first`.

    Returns this rank's part of the loss and of the objective's other figures, scalars, whose means over the ranks are the
    means over all that the update counts. Ranks reduce the gradients in the last backward only. Between micro-batches the
    ranks agree on whether one has to stop; then returns None.
    """
    model, accelerator = run.model, run.accelerator
    count = run.loader.micro_batches(sequences)
    totals = {"loss": torch.zeros((), device=accelerator.device)}
    for number, batch in enumerate(run.loader.update(first, sequences), start=1):
        if number > 1 and run.interrupted():
            return None
        with nullcontext() if number == count else accelerator.no_sync(model):
            found = run.objective(model, batch)
            loss, others = found if isinstance(found, tuple) else (found, {})
            loss = loss / batch.divisor
            accelerator.backward(loss)
        totals["loss"] += loss.detach()
        for name in run.figure_names(others):
            totals[name] = (
                totals.get(name, 0) + torch.as_tensor(others[name]).detach() / batch.divisor
            )
    return totals
