"""The training loop: `train` builds a run, `run_updates` trains it, `finish` ends it.

Read next: `run.py`, what a run is; `callbacks.py`, what happens between updates, such as
evaluations and checkpoints; `setup.py`, which builds all parts; `lifecycle.py`, the start and the
end of a run.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch, hash64
from gpt2_accel.data.source import Data
from gpt2_accel.estimate.dry_run import estimate_run
from gpt2_accel.first_model import NewModel
from gpt2_accel.lifecycle import finish, is_complete, lock_run_dir, started
from gpt2_accel.models import LanguageModel
from gpt2_accel.optim import build_optimizer, learning_rate, set_learning_rate, set_training
from gpt2_accel.run import Loss, Objective, Run
from gpt2_accel.runtime.accelerator import build_accelerator, clip_gradients, close
from gpt2_accel.runtime.device import seed_generators
from gpt2_accel.runtime.signals import is_first, lasting_output
from gpt2_accel.setup import find_data, setup


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
            run = setup(config, accelerator, data, model, objective, optimizer, callbacks)
            finished = is_complete(run)
            if not finished:
                with started(run):
                    run_updates(run)
                    finished = finish(run)
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
    while run.goes_on():
        # Learning rate, data order and dropout seed are functions of the step, so they have no
        # state to resume.
        first = schedule.first(run.step)  # the position of the update's first sequence in the data
        lr = learning_rate(config, first / schedule.full)
        set_learning_rate(optimizer, lr, config.learning_rate)
        seed = int(hash64(config.seed, run.step, accelerator.process_index)[0])
        seed_generators(accelerator.device, seed)
        totals = accumulate_gradients(run, first, schedule.sequences(run.step))
        if totals is None:  # a rank has to stop: the unfinished update is dropped
            break
        grad_norm = clip_gradients(accelerator, model, config.max_grad_norm)
        figures = run.reduce(totals, grad_norm)  # the host waits for the device here
        scaled = accelerator.scaler is not None  # fp16
        problem = run.guard.check(figures["loss"], figures["grad_norm"], scaled=scaled)
        if problem is None:
            run.call("on_pre_optimizer_step")
            optimizer.step()
        elif scaled:
            accelerator.scaler.update()
        optimizer.zero_grad()
        figures["learning_rate"] = lr
        run.end_update(figures, problem)


def accumulate_gradients(run: Run, first: int, sequences: int) -> dict[str, torch.Tensor] | None:
    """Runs forward and backward on this rank's micro-batches of one update.

    The update has `sequences` sequences, from position `first` in the data. Returns this rank's
    loss and other figures, scalars; their means over the ranks are the figures of the update.
    Returns None if a rank has to stop, on which the ranks agree between micro-batches. Gradients
    are reduced over the ranks in the last backward pass only.
    """
    model = run.model
    accelerator = run.accelerator
    count = run.loader.micro_batches(sequences)
    totals = {"loss": torch.zeros((), device=accelerator.device)}
    for number, batch in enumerate(run.loader.update(first, sequences), start=1):
        if number > 1 and run.interrupted():
            return None
        with nullcontext() if number == count else accelerator.no_sync(model):
            result = run.objective(model, batch)
            loss, others = result if isinstance(result, tuple) else (result, {})
            loss = loss / batch.divisor
            accelerator.backward(loss)
        totals["loss"] += loss.detach()
        for name in run.figure_names(others):
            value = torch.as_tensor(others[name]).detach().float() / batch.divisor
            totals[name] = totals.get(name, 0) + value
    return totals
