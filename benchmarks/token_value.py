"""Token efficiency of AdamW and Muon, tuned with equal budgets of trials, on two corpora and at two model sizes.

    python benchmarks/token_value.py --corpora data/python_stdlib data/shakespeare_char

The corpora are the data of `quickstart.py` (Python's standard library, a BPE of 4,096 tokens) and `shakespeare_char.py`
(tiny Shakespeare, characters). Sequences have 64 tokens. NanoGPT's settings for a CPU see 1.54M tokens, AdamW half of
these, Muon three quarters of AdamW's.

1. *Screening*, on each corpus at the smaller size with seed 0: each optimizer tries `--trials` settings, by coordinate
   descent over `AXES`.
2. *Rates*: the peak learning rate at the larger size, to a factor of two, with seed 0.
3. *Finals*, in all four cases with `--seeds` other seeds: nanoGPT's settings, AdamW, and Muon with two numbers of tokens.
4. *Widths*, with seed 0: the loss at several learning rates for three widths, on the last corpus.
5. *Levers*, at the smaller size with the same seeds and the smaller number of tokens: Muon with one setting changed.

A run's loss is that of the validation split, at most its first 131,072 tokens, in nats per token. The runs are in
`token_value.csv` in the results. Runs that it contains are skipped, so the study can be stopped and started again.
"""

import csv
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path

from results import RESULTS, write_result
from token_table import T95, draw_widths
from token_training import LENGTH, Trial, train

from gpt2_accel import cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.data.tokenizing import end_with_parent

SMALL, LARGE = "2 layers of 64", "4 layers of 128"
WIDTHS = (SMALL, "2 layers of 128", "2 layers of 256")
ADAMW_SHARE = 0.5  # of nanoGPT's tokens
MUON_SHARES = (0.25, 0.375)  # of nanoGPT's tokens
LEVER_SHARE, WIDTHS_SHARE = 0.25, 0.2  # of nanoGPT's tokens
RATES = [1e-3 * 2 ** (k / 2) for k in range(-4, 17)]
RELATIVE_RATES = [2.0 ** (k / 2) for k in range(-6, 9)]
# The values of each setting. The descent walks along the settings in this order.
COMMON = {
    "rate": RATES,
    "sequences": [3, 6, 12, 24, 48],
    "schedule": ["constant", "linear", "wsd", "cosine"],
    "weight_decay": [0.0, 0.03, 0.1, 0.3, 1.0],
    "beta2": [0.9, 0.95, 0.98, 0.99, 0.999],
    "warmup": [0.01, 0.02, 0.05, 0.1, 0.2],
}
AXES = {
    "adamw": COMMON | {"min_ratio": [0.0, 0.1]},
    "muon": COMMON
    | {
        "embedding_rate": RELATIVE_RATES,
        "vector_rate": RELATIVE_RATES,
        "cautious": [False, True],
        "momentum": [0.85, 0.9, 0.95, 0.98],
        "momentum_warmup": [0.0, 0.15, 0.4],
        "average": [0.0, 0.05, 0.2],
    },
}
LEVERS = AXES["muon"].keys() - COMMON.keys()
LONG_AXIS = 8  # values; the first pass takes two steps at once along longer axes


@dataclass
class Study:
    corpora: list[str] = setting(
        ["data/python_stdlib", "data/shakespeare_char"], "folders of token shards"
    )
    tokens: int = setting(2000 * 12 * LENGTH, "training tokens of nanoGPT's settings")
    trials: int = setting(26, "settings that each optimizer may try on each corpus")
    seeds: int = setting(5, "runs at each of the settings found, with seeds 1, 2, …")
    processes: int = setting(os.cpu_count() or 1, "runs at a time, each on one thread")
    results: str = setting(str(RESULTS), "folder of the results")

    def __post_init__(self) -> None:
        self.corpora = [str(Path(corpus)) for corpus in self.corpora]
        if self.seeds not in T95:
            raise ValueError(
                f"--seeds must be from {min(T95)} to {max(T95)} for an interval, got {self.seeds}"
            )


class Runs:
    """The runs in a CSV file: trial -> loss. `workers` train new ones, which are added.

    Raises `ValueError` if the last row is not complete, as after a full disk.
    """

    def __init__(self, path: Path, workers: Executor):
        self.path, self.workers, self.lock = path, workers, threading.Lock()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            raise ValueError(f"{path} ends in the middle of a row: remove its last line")
        rows = csv.DictReader(text.splitlines())
        self.losses = {as_trial(row): float(row["loss"]) for row in rows}

    def run(self, trials: Iterable[Trial]) -> list[float]:
        """Returns the losses of `trials`; trains those that the file does not contain."""
        trials = list(trials)
        missing = [trial for trial in dict.fromkeys(trials) if trial not in self.losses]
        waiting = {self.workers.submit(train, trial): trial for trial in missing}
        for done in as_completed(waiting):
            with self.lock:
                self.add(waiting[done], done.result())
        return [self.losses[trial] for trial in trials]

    def add(self, trial: Trial, loss: float) -> None:
        """Appends a run to the file."""
        new = not self.path.exists() or not self.path.stat().st_size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*(f.name for f in fields(Trial)), "loss"])
            if new:
                writer.writeheader()
            writer.writerow(asdict(trial) | {"loss": loss})
        self.losses[trial] = loss
        print(f"{loss:.4f} {trial}", flush=True)


def as_trial(row: dict[str, str]) -> Trial:
    """Returns the trial of a row of the CSV file."""
    kinds = {str: str, int: int, float: float, bool: lambda text: text == "True"}
    return Trial(**{f.name: kinds[f.type](row[f.name]) for f in fields(Trial)})


class Descent:
    """Coordinate descent over `axes`: walks along one setting at a time, as long as the loss falls.

    The first pass takes two steps of a long axis at once, later ones single steps. It ends after `budget` settings, or
    when a pass of single steps changes nothing.
    """

    def __init__(self, runs: Runs, best: Trial, axes: dict[str, list], budget: int):
        self.runs, self.best, self.axes, self.budget = runs, best, axes, budget
        [loss] = runs.run([best])
        self.losses = {best: loss}

    def run(self) -> Trial:
        """Returns the best trial."""
        stride = 2
        while len(self.losses) < self.budget:
            before = self.best
            for name, values in self.axes.items():
                self.walk(name, values, stride if len(values) > LONG_AXIS else 1)
            if stride == 1 and self.best == before:
                break
            stride = 1
        return self.best

    def walk(self, name: str, values: Sequence, stride: int) -> None:
        """Tries both neighbours of the current value. Continues in a direction as long as the loss falls."""
        steps = (-stride, stride)
        while steps:
            at = values.index(getattr(self.best, name))
            near = {s: values[at + s] for s in steps if 0 <= at + s < len(values)}
            found = {s: changed(self.best, name, value) for s, value in near.items()}
            found = {s: trial for s, trial in found.items() if trial not in self.losses}
            found = dict(list(found.items())[: self.budget - len(self.losses)])
            losses = dict(zip(found, self.runs.run(found.values()), strict=True))
            self.losses |= {found[s]: loss for s, loss in losses.items()}
            steps = ()
            if losses and min(losses.values()) < self.losses[self.best]:
                step = min(losses, key=losses.get)
                self.best, steps = found[step], (step,)


def changed(trial: Trial, name: str, value: object) -> Trial:
    """Returns `trial` with another setting. The learning rate follows the square root of the batch size."""
    other = replace(trial, **{name: value})
    if name != "sequences":
        return other
    return replace(other, rate=nearest(trial.rate * math.sqrt(value / trial.sequences)))


def nearest(rate: float) -> float:
    """Returns the nearest of `RATES`."""
    return min(RATES, key=lambda other: abs(math.log(other / rate)))


def start(optimizer: str, corpus: str, tokens: int) -> Trial:
    """Returns the settings at which the screening of an optimizer begins."""
    rate, share = {"adamw": (5.7e-3, ADAMW_SHARE), "muon": (1.1e-2, MUON_SHARES[-1])}[optimizer]
    return Trial(corpus, SMALL, optimizer, int(share * tokens), nearest(rate))


def screen(runs: Runs, config: Study) -> list[Descent]:
    """Tunes each optimizer on each corpus at the smaller size."""

    def descend(corpus: str, optimizer: str) -> Descent:
        first = start(optimizer, corpus, config.tokens)
        descent = Descent(runs, first, AXES[optimizer], config.trials)
        descent.run()
        return descent

    kinds = [(corpus, optimizer) for corpus in config.corpora for optimizer in AXES]
    with ThreadPoolExecutor(len(kinds)) as threads:
        return list(threads.map(descend, *zip(*kinds, strict=True)))


def best_rate(runs: Runs, trial: Trial) -> Trial:
    """Returns `trial` with the best learning rate, to a factor of two."""
    descent = Descent(runs, trial, {}, len(RATES))
    descent.walk("rate", RATES, 2)
    return descent.best


def nanogpt(corpus: str, size: str, tokens: int) -> Trial:
    """Returns nanoGPT's settings for a CPU (its README, "i only have a macbook")."""
    return Trial(corpus, size, "adamw", tokens, 1e-3, schedule="cosine", min_ratio=0.1, beta2=0.99)


def contestants(runs: Runs, config: Study, found: Sequence[Trial]) -> Iterator[tuple[str, Trial]]:
    """Yields the name and the settings, with seed 0, of each contestant of the finals in each case."""
    larger = [replace(trial, size=LARGE) for trial in found]
    with ThreadPoolExecutor(len(larger)) as threads:
        larger = list(threads.map(lambda trial: best_rate(runs, trial), larger))
    for size in (SMALL, LARGE):
        for corpus in config.corpora:
            yield "nanoGPT", nanogpt(corpus, size, config.tokens)
    for trial in (*found, *larger):
        if trial.optimizer == "adamw":
            yield "AdamW", trial
            continue
        for share in MUON_SHARES:
            yield "Muon", replace(trial, tokens=int(share * config.tokens))


def levers(tried: Iterable[Trial], trial: Trial) -> Iterator[tuple[str, Trial]]:
    """Yields the name of each of `LEVERS`, and `trial` with another value of it.

    It is the value at the start of the screening if the screening changed it. Otherwise it is the first other value of
    `tried`, the trials of the screening from the best on, or the next one on the axis.
    """
    first = start(trial.optimizer, trial.corpus, trial.tokens)
    for name in sorted(LEVERS):
        value = getattr(first, name)
        if value == getattr(trial, name):
            axis = AXES[trial.optimizer][name]
            others = (getattr(other, name) for other in tried)
            following = axis[(axis.index(value) + 1) % len(axis)]
            value = next((other for other in others if other != value), following)
        yield name, changed(trial, name, value)


def widths(config: Study, found: Sequence[Trial]) -> Iterator[Trial]:
    """Yields the trials that show the best learning rate at each of `WIDTHS`, on the last corpus."""
    for trial in found[-len(AXES) :]:
        best = changed(trial, "sequences", 12)
        at = RATES.index(best.rate)
        for size in WIDTHS:
            for rate in RATES[max(at - 8, at % 2) : at + 5 : 2]:
                yield replace(best, size=size, rate=rate, tokens=int(WIDTHS_SHARE * config.tokens))


def worker_processes(count: int) -> Executor:
    """Starts processes that train; they end with this one, also after a kill."""
    return ProcessPoolExecutor(count, get_context("spawn"), follow_parent)


def follow_parent() -> None:
    """Makes this worker process end when its parent has ended."""
    threading.Thread(target=end_with_parent, daemon=True).start()


def study(config: Study, runs: Runs) -> dict:
    """Trains what the study needs; returns its figures."""

    def with_seeds(*trials: Trial) -> list[Trial]:
        """Returns `trials` with each seed, all trials of one seed first."""
        seeds = range(1, config.seeds + 1)
        return [replace(trial, seed=seed) for seed in seeds for trial in trials]

    descents = screen(runs, config)
    found = [descent.best for descent in descents]
    finals = list(contestants(runs, config, found))
    runs.run(with_seeds(*(trial for _, trial in finals)))
    by_width = list(widths(config, found))
    runs.run(by_width)
    changes = []
    for descent in descents:
        if descent.best.optimizer == "muon":
            base = replace(descent.best, tokens=int(LEVER_SHARE * config.tokens))
            tried = sorted(descent.losses, key=descent.losses.get)
            changes += [(base, name, other) for name, other in levers(tried, base)]
    runs.run(with_seeds(*(other for *_, other in changes)))
    return {
        "screening": [
            {"trial": asdict(descent.best), "trials": len(descent.losses)} for descent in descents
        ],
        "finals": [
            {"name": name, "trial": asdict(trial), "losses": runs.run(with_seeds(trial))}
            for name, trial in finals
        ],
        "levers": [
            {
                "corpus": base.corpus,
                "name": name,
                "found": getattr(base, name),
                "other": getattr(other, name),
                "found_losses": runs.run(with_seeds(base)),
                "other_losses": runs.run(with_seeds(other)),
            }
            for base, name, other in changes
        ],
        "widths": [
            {"optimizer": t.optimizer, "size": t.size, "rate": t.rate, "loss": runs.losses[t]}
            for t in by_width
        ],
    }


def main() -> None:
    config = parse_config(Study)
    path = Path(config.results) / "cpu" / "token_value.csv"
    with worker_processes(config.processes) as workers:
        figures = study(config, Runs(path, workers))
    draw_widths(figures, path.with_name("learning_rates.png"))
    write_result("token_value", figures, config.results)


if __name__ == "__main__":
    cli.run(main)
