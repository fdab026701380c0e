"""Trains with a model or objective of its own: `CASE` names it. With `FSDP` it is sharded."""

import os
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from launching import allow_fsdp_on_cpus
from safetensors.torch import save_file

from gpt2_accel import cli
from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data import Data
from gpt2_accel.run import Run
from gpt2_accel.runtime import guard
from gpt2_accel.runtime.device import full_tensor, is_shard
from gpt2_accel.tokenizer import byte_tokenizer
from gpt2_accel.train import next_token_loss, train

RANK = os.environ.get("RANK", "0")
T = 32  # tokens of a window of the sources


class Ends:
    """Rank 1 ends the run by a method of it."""

    def __init__(self, request):
        self.request = request

    def on_step_end(self, run, skipped):
        if run.step == 2 and RANK == "1":
            self.request(run, "rank 1 has enough")


class Gradients:
    """Saves the gradients of the first update, by parameter, in the run's folder."""

    def on_pre_optimizer_step(self, run):
        if run.step == 0:
            parameters = dict(unwrap(run.accelerator, run.model).named_parameters())
            assert all(is_shard(p) == ("FSDP" in os.environ) for p in parameters.values())
            gradients = {name: full_tensor(p.grad).clone() for name, p in parameters.items()}
            if RANK == "0":
                save_file(gradients, run.run_dir / "gradients.safetensors")


def named(model, batch):
    """Rank 1 names its figure otherwise."""
    return next_token_loss(model, batch), {"one" if RANK == "1" else "zero": 1.0}


def two_forwards(model, batch):
    """The default loss, and a fourth of the loss on other tokens, which is a figure too."""
    loss = next_token_loss(model, batch)
    other = model(batch.input_ids.roll(1, dims=1), batch.targets, documents=batch.documents)
    return loss + other / 4, {"other": other}


def inner_module(model, batch):
    """Calls the module that DDP wraps."""
    return next_token_loss(model.module, batch)


def drawn(model, batch):
    """A random number of each process, as dropout draws them."""
    return next_token_loss(model, batch), {"draw": torch.rand(())}


def noisy(update, rank="0"):
    """The default loss; the micro-batch number `update` of a rank, from 0 on, is noise."""
    calls = count()

    def objective(model, batch):
        if next(calls) == update and rank == RANK:
            noise = torch.Generator().manual_seed(0)
            tokens = torch.randint(0, 257, batch.targets.shape, generator=noise)
            batch = batch._replace(targets=tokens.to(batch.targets.device))
        return next_token_loss(model, batch)

    return objective


def diverging():
    """The default loss, which is NaN from the seventh micro-batch on."""
    calls = count()

    def objective(model, batch):
        loss = next_token_loss(model, batch)
        return loss * torch.nan if next(calls) >= 6 else loss

    return objective


class Weights:
    """Saves the weights of each rank, in the run's folder."""

    def on_train_end(self, run, finished):
        weights = unwrap(run.accelerator, run.model).state_dict()
        save_file(weights, run.run_dir / f"weights-{RANK}.safetensors")


class Drawn:
    """Windows of random tokens, a function of their number; the later half of each counts."""

    def __init__(self, size=64, seed=0, draw=None):
        self.size = size
        self.seed = seed
        self.draw = draw or (lambda i: np.random.default_rng((seed, i)).integers(257, size=T + 1))

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.draw(i)


class Uneven(Drawn):
    """The window's number decides how many targets count; none in every fourth window."""

    def __getitem__(self, i):
        tokens = self.draw(i)
        targets = tokens[1:].copy()
        targets[self.counts(i) :] = -100
        return tokens[:-1], targets

    def counts(self, i):
        return 0 if i % 4 == 0 else 1 + i * 7 % T


def data_of(source, val=None):
    return Data(byte_tokenizer(), source, val, name="made up")


def own_data(config):
    return data_of(Uneven(), Uneven(seed=1, size=8))


CASES = {
    "noise": {"objective": noisy(20, rank="1"), "callbacks": [Weights()]},
    "diverges": {"objective": diverging()},
    "stop": {"callbacks": [Ends(Run.request_stop)]},
    "finish": {"callbacks": [Ends(Run.request_finish)]},
    "names": {"objective": named},
    "two": {"objective": two_forwards, "callbacks": [Gradients()]},
    "random": {"objective": drawn},
    "inner": {"objective": inner_module},
    "source": {"data": own_data},
}


def main() -> None:
    if "FSDP" in os.environ:
        allow_fsdp_on_cpus()
    guard.WINDOW = int(os.environ.get("WINDOW", guard.WINDOW))
    case = os.environ["CASE"]
    config = parse_config(TrainConfig)
    train(config, **CASES[case])
    if case in ("stop", "finish"):
        train(replace(config, output_dir=f"{config.output_dir}/second", n_embd=16, max_steps=2))


if __name__ == "__main__":
    cli.run(main)
