"""Token efficiency: the loss of AdamW, and of Muon with a half, a third and a quarter of AdamW's tokens.

    python benchmarks/token_value.py --corpus data/python_stdlib

The corpus is the data of `quickstart.py` (Python's standard library, a BPE of 4,096 tokens) or `shakespeare_char.py`
(tiny Shakespeare, characters). Two model sizes are trained, in updates of 12 x 64 tokens:

- nanoGPT's settings for a CPU;
- AdamW: the best learning rate with a linear schedule, to a factor of two, and the other schedules at that rate;
- Muon: the same search with half of the updates, then half and twice the batch size with the same tokens, then the best
  of these with fewer tokens.

The result is the loss in nats per token on the validation split, at most its first 131,072 tokens. Runs that the
results already contain are skipped. At the end the updates of each kind are timed, in turns.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from results import RESULTS, read_result, summary, write_result
from timing import synchronize, this_device

from gpt2_accel import GPT, GPTConfig, cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.optim import build_optimizer, learning_rate, set_learning_rate

LENGTH = 64
SIZES = {"4 layers of 128": (4, 4, 128), "2 layers of 64": (2, 2, 64)}
FIRST_RATE = {
    "adamw": 2e-3,
    "muon": 8e-3,
}  # the search doubles or halves it while the loss improves
WARMUP = 0.05  # share of the updates
WARM_UP, TIMED = 3, 50  # updates before and during timing


@dataclass
class Study:
    corpus: str = setting("data/python_stdlib", "folder of token shards that a recipe prepared")
    updates: int = setting(2000, "updates of AdamW; Muon has at most half of them")
    results: str = setting(str(RESULTS), "folder of the results")


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
    """A run, and its validation loss in nats per token."""

    trial: Trial
    loss: float


class Runs:
    """The runs on one corpus. Earlier runs are read from the results; new ones are added to them."""

    def __init__(self, config: Study):
        self.config = config
        self.name = f"token_value-{Path(config.corpus).name}"
        found = read_result(self.name, this_device().type, config.results) or {"runs": []}
        outcomes = [Outcome(Trial(**run["trial"]), run["loss"]) for run in found["runs"]]
        self.done = {outcome.trial: outcome for outcome in outcomes}

    def run(self, trial: Trial) -> Outcome:
        """Returns the outcome of `trial`; trains it unless the results contain it."""
        if trial not in self.done:
            self.done[trial] = train(self.config.corpus, trial)
            print(*asdict(self.done[trial]).values(), flush=True)
            self.write()
        return self.done[trial]

    def loss(self, trial: Trial) -> float:
        """Returns the validation loss of `trial` in nats per token."""
        return self.run(trial).loss

    def write(self, **figures: object) -> None:
        """Writes all runs so far, and further `figures`."""
        runs = [asdict(outcome) for outcome in self.done.values()]
        write_result(self.name, {"length": LENGTH, "runs": runs, **figures}, self.config.results)


def main() -> None:
    config = parse_config(Study)
    runs = Runs(config)
    for size in SIZES:
        runs.run(nanogpt(size, config.updates))
        for optimizer, updates in (("adamw", config.updates), ("muon", config.updates // 2)):
            best = search(runs, size, optimizer, updates)
        best = min((best, *other_batches(best)), key=runs.loss)
        for trial in fewer_tokens(best):
            runs.run(trial)
    runs.write(updates=update_times(config.corpus, list(runs.done)))


def nanogpt(size: str, updates: int) -> Trial:
    """Returns nanoGPT's settings for a CPU."""
    return Trial(size, "adamw", 1e-3, updates, "cosine", min_ratio=0.1, beta2=0.99)


def search(runs: Runs, size: str, optimizer: str, updates: int) -> Trial:
    """Returns the best learning rate with a linear schedule, and the best schedule at that rate."""
    best = Trial(size, optimizer, FIRST_RATE[optimizer], updates)
    for factor in (2, 0.5):
        while runs.loss(other := replace(best, rate=best.rate * factor)) < runs.loss(best):
            best = other
    return min(
        (replace(best, schedule=name) for name in ("linear", "cosine", "wsd")), key=runs.loss
    )


def other_batches(trial: Trial) -> Iterator[Trial]:
    """Yields half and twice the batch size with the same tokens; the rate scales with its square root."""
    for factor in (0.5, 2):
        yield replace(
            trial,
            sequences=int(trial.sequences * factor),
            updates=int(trial.updates / factor),
            rate=trial.rate * factor**0.5,
        )


def fewer_tokens(trial: Trial) -> Iterator[Trial]:
    """Yields `trial` with two thirds and a half of its tokens: a third and a quarter of AdamW's."""
    return (replace(trial, updates=2 * trial.updates // part) for part in (3, 4))


class Training:
    """A new model, trained with the settings of `trial`; each call makes one update."""

    def __init__(self, corpus: str, trial: Trial):
        self.trial, device = trial, this_device()
        torch.manual_seed(0)
        n_layer, n_head, n_embd = SIZES[trial.size]
        vocab_size = read_manifest(corpus)["tokenizer"]["vocab_size"]
        self.model = GPT(GPTConfig(vocab_size, LENGTH, n_layer, n_head, n_embd)).to(device)
        betas = (0.9, trial.beta2)
        self.optimizer = build_optimizer(self.model, trial.optimizer, lr=trial.rate, betas=betas)
        self.loader = TrainLoader(
            open_split(corpus, "train"),
            sequence_length=LENGTH,
            micro_batch_size=trial.sequences,
            seed=0,
            device=device,
        )

    def __call__(self, step: int) -> None:
        """Makes update `step`; the first update is 0."""
        trial = self.trial
        lr = learning_rate(
            step,
            peak=trial.rate,
            schedule=trial.schedule,
            warmup_steps=int(WARMUP * trial.updates),
            max_steps=trial.updates,
            min_ratio=trial.min_ratio,
        )
        set_learning_rate(self.optimizer, lr)
        for input_ids, targets in self.loader.update(step * trial.sequences, trial.sequences):
            self.model(input_ids, targets).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(corpus: str, trial: Trial) -> Outcome:
    """Trains a new model with the settings of `trial`."""
    training = Training(corpus, trial)
    for step in range(trial.updates):
        training(step)
    windows = EvalLoader(
        open_split(corpus, "val"),
        sequence_length=LENGTH,
        batch_size=64,
        max_tokens=2**17,
        device=this_device(),
    )
    return Outcome(trial, evaluate(training.model, windows))


def update_times(corpus: str, trials: list[Trial]) -> list[dict]:
    """Measures the milliseconds of an update for each size, optimizer and batch size in `trials`."""
    kinds = {(trial.size, trial.optimizer, trial.sequences): trial for trial in trials}
    trainings = [Training(corpus, trial) for trial in kinds.values()]
    milliseconds: list[list[float]] = [[] for _ in trainings]
    for step in range(WARM_UP + TIMED):
        for training, found in zip(trainings, milliseconds, strict=True):
            begun = time.perf_counter()
            training(step)
            synchronize(this_device())
            found.append((time.perf_counter() - begun) * 1000)
    return [
        {"size": size, "optimizer": optimizer, "sequences": sequences}
        | {"milliseconds": summary(found[WARM_UP:])}
        for (size, optimizer, sequences), found in zip(kinds, milliseconds, strict=True)
    ]


@torch.no_grad()
def evaluate(model: GPT, loader: EvalLoader) -> float:
    """Returns the mean loss on the windows of `loader`, in nats per token."""
    nats = count = 0.0
    for input_ids, targets in loader:
        nats += float(model(input_ids, targets, reduction="none").sum())
        count += int((targets != -100).sum())
    return nats / count


if __name__ == "__main__":
    cli.run(main)
