"""One run of the studies of tokens and of architectures: a small model, trained with any of their settings.

Some settings exist only here: relative learning rates, cautious weight decay, momentum warmup, the average of the last
weights. `token_value.py` measures what they bring.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
from between import CHANGES, ROPE_THETA, Between, BetweenConfig
from torch import nn

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.device import has_bf16
from gpt2_accel.kernels.cpu import tune_memory
from gpt2_accel.models.qwen3 import Qwen3, Qwen3Config
from gpt2_accel.optim import build_optimizer, hidden_matrices, learning_rate

LENGTH = 64  # tokens per sequence
SIZES = {  # layers, heads, width
    "2 layers of 64": (2, 2, 64),
    "2 layers of 128": (2, 2, 128),
    "2 layers of 256": (2, 4, 256),
    "4 layers of 128": (4, 4, 128),
}
EVAL_TOKENS = 2**17
MODELS = ("GPT-2", *CHANGES, "Qwen3")  # each of CHANGES with those before it
FIRST_MOMENTUM = 0.85  # at the start of the momentum warmup
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """The settings of one run. `rate` is the peak learning rate; shares are of all updates."""

    corpus: str
    size: str
    optimizer: str
    tokens: int
    rate: float
    seed: int = 0
    sequences: int = 12  # per update
    schedule: str = "linear"
    min_ratio: float = 0.0
    warmup: float = 0.05
    weight_decay: float = 0.1
    beta2: float = 0.95
    embedding_rate: float = 1.0  # relative to `rate`, as the next one
    vector_rate: float = 1.0
    cautious: bool = False  # decay only the weights that the update moves towards zero
    momentum: float = 0.95  # Muon's
    momentum_warmup: float = 0.0  # share of updates in which it grows from FIRST_MOMENTUM
    average: float = 0.0  # last share of updates whose weights are averaged
    model: str = "GPT-2"  # one of MODELS

    @property
    def updates(self) -> int:
        return self.tokens // (self.sequences * LENGTH)


def build(trial: Trial) -> nn.Module:
    """Builds the new model of a trial."""
    vocab_size = read_manifest(trial.corpus)["tokenizer"]["vocab_size"]
    shape = vocab_size, LENGTH, *SIZES[trial.size]
    if trial.model == "GPT-2":
        return GPT(GPTConfig(*shape))
    if trial.model == "Qwen3":
        _, _, n_layer, n_head, n_embd = shape
        sizes = (n_layer, n_head, n_head // 2, n_embd // n_head, n_embd, 3 * n_embd)
        return Qwen3(Qwen3Config(vocab_size, LENGTH, *sizes, rope_theta=ROPE_THETA))
    return Between(BetweenConfig(*shape, CHANGES.index(trial.model) + 1))


class Training:
    """A new model, trained with the settings of `trial`; each call makes one update."""

    def __init__(self, trial: Trial):
        self.trial = trial
        torch.manual_seed(trial.seed)
        self.model = build(trial)
        self.optimizer = build_optimizer(
            self.model,
            trial.optimizer,
            lr=trial.rate,
            betas=(0.9, trial.beta2),
            weight_decay=trial.weight_decay,
        )
        self.loader = TrainLoader(
            open_split(trial.corpus, "train"),
            sequence_length=LENGTH,
            micro_batch_size=trial.sequences,
            seed=trial.seed,
            device=CPU,
        )
        self.set_relative_rates()
        self.decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.mean: list[torch.Tensor] = []

    def set_relative_rates(self) -> None:
        """Gives each parameter group its learning rate relative to the schedule's."""
        hidden = {id(p) for _, p in hidden_matrices(self.model)}
        for group in self.optimizer.param_groups:
            if group["params"][0].ndim < 2:
                group["relative"] = self.trial.vector_rate
            elif all(id(p) in hidden for p in group["params"]):
                group["relative"] = 1.0
            else:  # Muon's group of embeddings; AdamW has one group of all matrices
                group["relative"] = self.trial.embedding_rate

    def __call__(self, step: int) -> None:
        """Makes update `step`; the first update is 0."""
        trial, optimizer = self.trial, self.optimizer
        lr = learning_rate(
            step,
            peak=trial.rate,
            schedule=trial.schedule,
            warmup_steps=int(trial.warmup * trial.updates),
            max_steps=trial.updates,
            min_ratio=trial.min_ratio,
        )
        for group in optimizer.param_groups:
            group["lr"] = lr * group["relative"]
        growing = trial.momentum_warmup * trial.updates
        share = min(step / growing, 1) if growing else 1
        optimizer.momentum = FIRST_MOMENTUM + share * (trial.momentum - FIRST_MOMENTUM)
        for input_ids, targets, *_ in self.loader.update(step * trial.sequences, trial.sequences):
            with products():
                loss = self.model(input_ids, targets)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if trial.cautious:
            self.cautious_step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if step >= (1 - trial.average) * trial.updates:
            self.add_to_mean()

    @torch.no_grad()
    def cautious_step(self) -> None:
        """Makes an update whose weight decay skips the weights that the update moves away from zero."""
        groups = self.optimizer.param_groups
        before = [[p.clone() for p in group["params"]] for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0
        self.optimizer.step()
        for group, olds, decay in zip(groups, before, self.decays, strict=True):
            for p, old in zip(group["params"], olds, strict=True):
                p -= group["lr"] * decay * old * ((old - p) * old > 0)

    @torch.no_grad()
    def add_to_mean(self) -> None:
        """Adds the weights to the average."""
        params = list(self.model.parameters())
        if not self.mean:
            self.mean, self.count = [p.clone() for p in params], 1
            return
        self.count += 1
        torch._foreach_lerp_(self.mean, params, 1 / self.count)

    @torch.no_grad()
    def loss(self) -> float:
        """Returns the loss on the first `EVAL_TOKENS` of the validation split, in nats per token."""
        for p, mean in zip(self.model.parameters(), self.mean, strict=bool(self.mean)):
            p.copy_(mean)
        windows = EvalLoader(
            open_split(self.trial.corpus, "val"),
            sequence_length=LENGTH,
            batch_size=16,
            max_tokens=EVAL_TOKENS,
            device=CPU,
        )
        nats = count = 0.0
        for input_ids, targets, *_ in windows:
            with products():
                losses = self.model(input_ids, targets, reduction="none")
            nats += float(losses.sum())
            count += int((targets != -100).sum())
        return nats / count


def products() -> contextlib.AbstractContextManager:
    """Matrix products in bf16 where the CPU computes them, else in fp32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bf16(CPU))


def train(trial: Trial) -> float:
    """Trains a new model on one thread; returns its loss, infinite if the run diverged."""
    torch.set_num_threads(1)
    tune_memory()
    training = Training(trial)
    for step in range(trial.updates):
        training(step)
    loss = training.loss()
    return loss if math.isfinite(loss) else math.inf
