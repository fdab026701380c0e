"""The training loop: `train` builds a run, `run_updates` trains it, `finish` ends it.

`runtime/setup.py` builds model, optimizer and data; `runtime/run.py` holds what the loop calls on `run`;
`runtime/guard.py` decides which updates are skipped and when there is nothing left to learn.
"""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext

import torch
from accelerate import Accelerator

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import TrainLoader, hash64
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.finish import finish, is_complete
from gpt2_accel.optim import set_learning_rate
from gpt2_accel.runtime.accelerator import build_accelerator, close
from gpt2_accel.runtime.run import Run, lock_run_dir
from gpt2_accel.runtime.setup import setup
from gpt2_accel.runtime.signals import lasting_output


def train(config: TrainConfig) -> bool:
    """Trains a model with the settings of `config`, on the hardware and in the precision of the Accelerate config.

    Writes checkpoints, logs and the final model, an HF directory, into `config.output_dir`. All ranks call it.

    Returns whether the run is complete. It is not if a signal or `max_hours` ends it with a checkpoint, and with
    `dry_run`, which trains nothing.

    Raises `ValueError` or `OSError` for settings or data that cannot work, before training, and `Diverged`, a
    `ValueError`, if the run diverges.
    """
    if config.dry_run:  # needs no Accelerator: the planned hardware may be another machine's
        if int(os.environ.get("RANK", 0)) == 0:
            print(dry_run(config))
        return False
    with lasting_output():
        accelerator = build_accelerator(config.deterministic)
        with lock_run_dir(config):
            run = setup(config, accelerator)
            finished = is_complete(run)
            if not finished:
                with run.opened():
                    run_updates(run)
                    finished = finish(run)
        close(accelerator)
    return finished


def run_updates(run: Run) -> None:
    """Trains until the last update, until early stopping or divergence ends the run, or until it has to stop."""
    config, accelerator, schedule = run.config, run.accelerator, run.schedule  # of the data
    model, optimizer = run.model, run.optimizer
    model.train()
    while run.goes_on():
        # Learning rate, data order and dropout seed are functions of the step, so they have no state to resume.
        first = schedule.first(run.step)  # sequence in the order of the data
        lr = config.learning_rate_at(first / schedule.sequences)
        set_learning_rate(optimizer, lr, config.learning_rate)
        torch.manual_seed(int(hash64(config.seed, run.step, accelerator.process_index)[0]))
        loss = accumulate_gradients(
            accelerator, model, run.loader, first, schedule.sequences, run.interrupted
        )
        if loss is None:  # a rank has to stop: the unfinished update is dropped
            break
        grad_norm = accelerator.clip_grad_norm_(
            model.parameters(), config.max_grad_norm or math.inf
        )
        loss, grad_norm = run.reduce(loss, grad_norm)
        problem = run.guard.check(loss, grad_norm, scaled=accelerator.scaler is not None)
        if problem is None:
            optimizer.step()
        elif accelerator.scaler is not None:  # fp16
            accelerator.scaler.update()
        optimizer.zero_grad()
        run.step += 1
        run.log_update({"loss": loss, "grad_norm": grad_norm, "learning_rate": lr}, problem)
        run.evaluate()
        run.sample()
        run.end_step()  # writes the step's metrics, and starts its checkpoint if one is due


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
    count = loader.micro_batches(sequences)
    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(loader.update(first, sequences), start=1):
        if number > 1 and interrupted():
            return None
        with nullcontext() if number == count else accelerator.no_sync(model):
            loss = model(batch.input_ids, batch.targets, documents=batch.documents) / batch.divisor
            accelerator.backward(loss)
        total += loss.detach()
    return total
