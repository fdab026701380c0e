"""What a token buys: Muon with half the tokens against AdamW, each at its best learning rate and schedule.

    python benchmarks/token_value.py

On two corpora (the Python standard library in a BPE of 4,096, and tiny Shakespeare in characters, as `quickstart.py`
and `shakespeare_char.py` prepare them) and two sizes of model. AdamW has `--updates` updates, Muon half of them. Each tries learning rates
under a linear schedule, then the other schedules at the best of them; then Muon tries batches half and twice as
large over the same tokens. A figure is the loss over the whole validation split, or its first 131,072 tokens.
"""

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import this_device

from gpt2_accel import GPT, GPTConfig, cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.optim import SCHEDULES, build_optimizer, learning_rate, set_learning_rate

LENGTH = 128
SIZES = {"small": (2, 2, 96), "medium": (4, 2, 128)}
RATES = {"adamw": (2e-3, 4e-3, 8e-3), "muon": (4e-3, 8e-3, 1.6e-2)}


@dataclass
class Study:
    corpora: list[str] = setting(
        ["data/python_stdlib", "data/shakespeare_char"],
        "folders of token shards, as recipes make them",
    )
    updates: int = setting(300, "of AdamW; Muon has half of them")
    sequences: int = setting(8, "of 128 tokens in an update")
    output: str = setting("benchmarks/results/token_value.json", "file for the figures")


@dataclass
class Result:
    """One run: what it was, its validation loss in nats, and its seconds, evaluation left out."""

    corpus: str
    size: str
    optimizer: str
    rate: float
    schedule: str
    sequences: int
    tokens: int
    loss: float
    seconds: float


def main() -> None:
    config = parse_config(Study)
    results: list[Result] = []
    for corpus, size in itertools.product(config.corpora, SIZES):
        results += contest(config, corpus, size)
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
        Path(config.output).write_text(json.dumps([vars(r) for r in results], indent=1) + "\n")
    print(table(results))


def contest(config: Study, corpus: str, size: str) -> list[Result]:
    """Both optimizers on one corpus with one size of model: all of their runs."""
    results = []
    for optimizer, updates in (("adamw", config.updates), ("muon", config.updates // 2)):
        own = [
            train(corpus, size, optimizer, rate, "linear", config.sequences, updates)
            for rate in RATES[optimizer]
        ]
        rate = min(own, key=lambda r: r.loss).rate
        own += [
            train(corpus, size, optimizer, rate, schedule, config.sequences, updates)
            for schedule in SCHEDULES
            if schedule not in ("linear", "constant")
        ]
        results += own
    best = min(own, key=lambda r: r.loss)
    for factor in (0.5, 2):  # the rate as the square root of the batch
        sequences, updates = int(config.sequences * factor), int(config.updates // 2 / factor)
        rate = best.rate * factor**0.5
        results.append(train(corpus, size, "muon", rate, best.schedule, sequences, updates))
    return results


def train(
    corpus: str, size: str, optimizer: str, rate: float, schedule: str, sequences: int, updates: int
) -> Result:
    """Trains a new model of `size`, prints and returns what came of it."""
    device = this_device()
    torch.manual_seed(0)
    n_layer, n_head, n_embd = SIZES[size]
    vocab_size = read_manifest(corpus)["tokenizer"]["vocab_size"]
    model = GPT(GPTConfig(vocab_size, LENGTH, n_layer, n_head, n_embd)).to(device)
    optim = build_optimizer(model, optimizer, lr=rate)
    shape = {"sequence_length": LENGTH, "device": device}
    loader = TrainLoader(open_split(corpus, "train"), micro_batch_size=sequences, seed=0, **shape)
    begun = time.perf_counter()
    for step in range(updates):
        lr = learning_rate(
            step, peak=rate, schedule=schedule, warmup_steps=20, max_steps=updates, min_ratio=0.0
        )
        set_learning_rate(optim, lr)
        for input_ids, targets in loader.update(step * sequences, sequences):
            model(input_ids, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
    seconds = time.perf_counter() - begun
    loss = evaluate(
        model, EvalLoader(open_split(corpus, "val"), batch_size=32, max_tokens=2**17, **shape)
    )
    tokens = updates * sequences * LENGTH
    name = Path(corpus).name
    result = Result(name, size, optimizer, rate, schedule, sequences, tokens, loss, seconds)
    print(*vars(result).values(), sep="\t", flush=True)
    return result


@torch.no_grad()
def evaluate(model: GPT, loader: EvalLoader) -> float:
    """The mean loss over the windows of `loader`, in nats per token."""
    nats = count = 0.0
    for input_ids, targets in loader:
        nats += float(model(input_ids, targets, reduction="none").sum())
        count += int((targets != -100).sum())
    return nats / count


def table(results: list[Result]) -> str:
    """For each corpus and size the best of each optimizer, as Markdown."""
    lines = [
        "| corpus | model | optimizer | best rate, schedule, batch | tokens | loss | seconds |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    order = ("corpus", "size", "optimizer")
    for key, group in itertools.groupby(
        sorted(results, key=lambda r: tuple(getattr(r, name) for name in order)),
        key=lambda r: tuple(getattr(r, name) for name in order),
    ):
        best = min(group, key=lambda r: r.loss)
        settings = f"{best.rate:.1e}, {best.schedule}, {best.sequences} x {LENGTH}"
        lines.append(
            f"| {' | '.join(key)} | {settings} | {best.tokens:,} | {best.loss:.3f} | {best.seconds:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
