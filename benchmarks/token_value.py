"""What a token buys: the loss that AdamW reaches, and Muon with a half, a third and a quarter of its tokens.

    python benchmarks/token_value.py --corpus data/python_stdlib

On a corpus as `quickstart.py` (Python's standard library, in a BPE of 4,096) or `shakespeare_char.py` (tiny
Shakespeare, in characters) prepare them, with two sizes of model, in updates of 12 x 64 tokens: nanoGPT's settings for a
CPU; AdamW at its best learning rate under a linear schedule, to a factor of two, and there under other schedules;
Muon the same with half of the updates, then in batches half and twice as large over the same tokens, then with fewer
tokens at what was best. A figure is the loss in nats per token over the validation split, or its first 131,072 tokens. Runs
that the results hold already are not run again.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from results import RESULTS, read_result, write_result
from timing import this_device

from gpt2_accel import GPT, GPTConfig, cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.optim import build_optimizer, learning_rate, set_learning_rate

LENGTH = 64
SIZES = {"4 layers of 128": (4, 4, 128), "6 layers of 192": (6, 6, 192)}
FIRST_RATE = {
    "adamw": 2e-3,
    "muon": 8e-3,
}  # of a search that doubles or halves it until that is worse
WARMUP = 0.05  # of the updates


@dataclass
class Study:
    corpus: str = setting("data/python_stdlib", "folder of token shards, as a recipe makes it")
    updates: int = setting(2000, "of AdamW; Muon has half of them, and fewer")
    results: str = setting(str(RESULTS), "folder for the figures")


@dataclass(frozen=True)
class Trial:
    """The settings of one run."""

    size: str
    optimizer: str
    rate: float
    updates: int
    schedule: str = "linear"
    sequences: int = 12
    min_ratio: float = 0.0
    beta2: float = 0.95


@dataclass(frozen=True)
class Outcome:
    """A run, its validation loss in nats per token, and the seconds of its updates, each taken as the median one."""

    trial: Trial
    loss: float
    seconds: float


class Runs:
    """The runs on one corpus: those of the results, and new ones, which are added to them."""

    def __init__(self, config: Study):
        self.config = config
        self.name = f"token_value-{Path(config.corpus).name}"
        found = read_result(self.name, this_device().type, config.results) or {"runs": []}
        self.done = {
            trial: Outcome(trial, **own)
            for own in found["runs"]
            for trial in [Trial(**own.pop("trial"))]
        }

    def run(self, trial: Trial) -> Outcome:
        """What came of `trial`."""
        if trial not in self.done:
            self.done[trial] = train(self.config.corpus, trial)
            print(*asdict(self.done[trial]).values(), flush=True)
            runs = [asdict(outcome) for outcome in self.done.values()]
            write_result(self.name, {"length": LENGTH, "runs": runs}, self.config.results)
        return self.done[trial]


def main() -> None:
    config = parse_config(Study)
    runs = Runs(config)
    for size in SIZES:
        runs.run(nanogpt(size, config.updates))
        for optimizer, updates in (("adamw", config.updates), ("muon", config.updates // 2)):
            best = search(runs, size, optimizer, updates)
        for trial in itertools.chain(other_batches(best), fewer_tokens(best, config.updates)):
            runs.run(trial)


def nanogpt(size: str, updates: int) -> Trial:
    """nanoGPT's settings for a CPU."""
    return Trial(size, "adamw", 1e-3, updates, "cosine", min_ratio=0.1, beta2=0.99)


def search(runs: Runs, size: str, optimizer: str, updates: int) -> Trial:
    """The best learning rate under a linear schedule, and the best schedule there."""

    def loss(trial: Trial) -> float:
        return runs.run(trial).loss

    best = Trial(size, optimizer, FIRST_RATE[optimizer], updates)
    for factor in (2, 0.5):
        while loss(other := replace(best, rate=best.rate * factor)) < loss(best):
            best = other
    return min((replace(best, schedule=name) for name in ("linear", "cosine", "wsd")), key=loss)


def other_batches(trial: Trial) -> Iterator[Trial]:
    """Half and twice the batch over the same tokens; the rate as the square root of the batch."""
    for factor in (0.5, 2):
        yield replace(
            trial,
            sequences=int(trial.sequences * factor),
            updates=int(trial.updates / factor),
            rate=trial.rate * factor**0.5,
        )


def fewer_tokens(trial: Trial, updates: int) -> Iterator[Trial]:
    """A third and a quarter of the tokens of so many updates."""
    return (replace(trial, updates=updates // part) for part in (3, 4))


def train(corpus: str, trial: Trial) -> Outcome:
    """Trains a new model as `trial` says."""
    device = this_device()
    torch.manual_seed(0)
    n_layer, n_head, n_embd = SIZES[trial.size]
    vocab_size = read_manifest(corpus)["tokenizer"]["vocab_size"]
    model = GPT(GPTConfig(vocab_size, LENGTH, n_layer, n_head, n_embd)).to(device)
    optimizer = build_optimizer(model, trial.optimizer, lr=trial.rate, betas=(0.9, trial.beta2))
    shape = {"sequence_length": LENGTH, "device": device}
    loader = TrainLoader(
        open_split(corpus, "train"), micro_batch_size=trial.sequences, seed=0, **shape
    )
    warmup = int(WARMUP * trial.updates)
    seconds = []
    for step in range(trial.updates):
        begun = time.perf_counter()
        lr = learning_rate(
            step,
            peak=trial.rate,
            schedule=trial.schedule,
            warmup_steps=warmup,
            max_steps=trial.updates,
            min_ratio=trial.min_ratio,
        )
        set_learning_rate(optimizer, lr)
        for input_ids, targets in loader.update(step * trial.sequences, trial.sequences):
            model(input_ids, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    windows = EvalLoader(open_split(corpus, "val"), batch_size=64, max_tokens=2**17, **shape)
    return Outcome(trial, evaluate(model, windows), statistics.median(seconds) * trial.updates)


@torch.no_grad()
def evaluate(model: GPT, loader: EvalLoader) -> float:
    """The mean loss over the windows of `loader`, in nats per token."""
    nats = count = 0.0
    for input_ids, targets in loader:
        nats += float(model(input_ids, targets, reduction="none").sum())
        count += int((targets != -100).sum())
    return nats / count


if __name__ == "__main__":
    cli.run(main)
