"""Scaling laws: trains sizes with equal FLOPs (Hoffmann et al., 2022, arXiv:2203.15556, approach 2), and fits a law to all runs.

The grid of a budget grows until at least two sizes lie on each side of the one with the lowest loss.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.device import GPUS
from gpt2_accel.estimate.dry_run import model_shape
from gpt2_accel.estimate.flops import TYPICAL_MFU
from gpt2_accel.estimate.law import (
    FEWEST_UPDATES,
    MAX_EPOCHS,
    FittedLaw,
    Rules,
    ScalingLaw,
    bootstrap_interval,
    sizes,
)
from gpt2_accel.estimate.memory import Launch, memory_by_part
from gpt2_accel.models import ModelConfig
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.law_fit import fit
from gpt2_accel.study.trials import Result, Trial

RATIO = 1.4  # of the parameters of neighbouring sizes, about
SIDE = 2  # sizes on each side of the lowest loss
TOKENS_PER_PARAMETER = 20  # of the middle one of a budget's first sizes
FEWEST_RUNS, FEWEST_SIZES, FEWEST_BUDGETS = 8, 3, 2  # for a fit


class Run(NamedTuple):
    """A run of the grid: its trial, its budget in FLOPs, and its result, None if it failed."""

    trial: Trial
    budget: float
    result: Result | None

    @property
    def loss(self) -> float:
        """The loss in nats per token, infinite if the run failed or diverged."""
        return math.inf if self.result is None else self.result.loss

    @property
    def tokens(self) -> int:
        return self.trial.tokens

    @property
    def shape(self) -> ModelConfig:
        vocab_size = read_manifest(self.trial.config.data_dir)["tokenizer"]["vocab_size"]
        return model_shape(self.trial.config, vocab_size)

    def parameters(self) -> int:
        """Returns N."""
        return self.shape.parameter_count


@dataclass(frozen=True)
class Grid:
    """The runs of a scaling study: for each of `budgets`, in FLOPs, sizes that differ by about `RATIO`.

    `base` is the trial that all runs share; `rules` give each its settings. A run that would read the data more than
    `max_epochs` times is refused.
    """

    base: Trial
    budgets: Sequence[float]
    rules: Rules = field(default_factory=Rules)
    max_epochs: float = MAX_EPOCHS

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.base.config.data_dir)

    @cached_property
    def ladder(self) -> list[Trial]:
        """A trial of each size, without tokens, from the smallest."""
        trials = [self.base.changed(**size) for size in sizes()]
        counts = [Run(trial, 0, None).parameters() for trial in trials]
        chosen = [0]
        while RATIO * counts[chosen[-1]] < counts[-1]:
            goal, rest = RATIO * counts[chosen[-1]], range(chosen[-1] + 1, len(counts))
            chosen.append(min(rest, key=lambda i: abs(math.log(counts[i] / goal))))
        return [trials[i] for i in chosen]

    def run(self, place: int, budget: float) -> Run:
        """Returns the run of a size of the ladder with a budget."""
        return with_budget(self.ladder[place], budget, self.rules)

    def epochs(self, run: Run) -> float:
        """Returns how often a run reads the training data."""
        return run.tokens / self.manifest["splits"]["train"]["tokens"]

    def first(self, budget: float) -> range:
        """Returns the places on the ladder of a budget's first sizes.

        Raises `ValueError` if one would read the data more than `max_epochs` times, or have too few updates."""

        def distance(place: int) -> float:
            run = self.run(place, budget)
            return abs(math.log(run.tokens / (TOKENS_PER_PARAMETER * run.parameters())))

        middle = max(SIDE, min(range(len(self.ladder)), key=distance))
        last = min(middle + SIDE, len(self.ladder) - 1)
        if (updates := self.run(last, budget).trial.config.max_steps) < FEWEST_UPDATES:
            raise ValueError(
                f"{budget:.3g} FLOPs are {updates} updates of a model of width {self.ladder[last].config.n_embd}, and a run needs "
                f"{FEWEST_UPDATES}: raise --budgets"
            )
        epochs = self.epochs(self.run(middle - SIDE, budget))
        if epochs > self.max_epochs:
            raise ValueError(
                f"the smallest model with {budget:.3g} FLOPs would read the data {epochs:.2g} times: prepare more text, lower "
                f"--budgets, or allow it by --max_epochs {math.ceil(epochs)}"
            )
        return range(middle - SIDE, last + 1)

    def runs(self, budget: float, engine: Engine) -> list[Run]:
        """Returns the runs of a budget by size, as far as the engine's results tell which ones are needed."""
        places = self.first(budget)
        while True:
            runs = [self.run(place, budget) for place in places]
            runs = [run._replace(result=engine.results.get(run.trial.id)) for run in runs]
            if not all(engine.knows(run.trial) for run in runs):
                return runs
            best = places[lowest(runs)]
            low, high = best - SIDE, best + SIDE + 1
            while low < places[0] and not self.allowed(low, budget):
                low += 1
            while high > places[-1] + 1 and not self.allowed(high - 1, budget):
                high -= 1
            wider = range(min(low, places[0]), max(places[-1] + 1, high))
            if wider == places:
                return runs
            places = wider

    def allowed(self, place: int, budget: float) -> bool:
        """Whether there is such a size, and it neither reads the data too often nor has too few updates."""
        if not 0 <= place < len(self.ladder):
            return False
        run = self.run(place, budget)
        return self.epochs(run) <= self.max_epochs and run.trial.config.max_steps >= FEWEST_UPDATES


def lowest(runs: Sequence[Run]) -> int:
    """Returns the place of the lowest loss."""
    return min(range(len(runs)), key=lambda place: runs[place].loss)


def with_budget(size: Trial, budget: float, rules: Rules) -> Run:
    """Returns the run of a size with the tokens that a budget in FLOPs pays for, in whole updates."""
    tokens, config = budget / size.flops_per_token, size.config
    settings = rules.settings(config.n_embd, tokens, config.tokens_per_sequence)
    label = f"{budget:.3g}-width{config.n_embd}"
    return Run(size.changed(label=label, **settings), budget, None)


@dataclass
class Scaling:
    """The outcome of a scaling study: its runs by budget, and the law, None if there are too few runs."""

    grid: Grid
    runs: dict[float, list[Run]]
    failed: dict[str, str]
    law: FittedLaw | None = None

    @property
    def finished(self) -> list[Run]:
        """The runs with a loss."""
        return [run for runs in self.runs.values() for run in runs if math.isfinite(run.loss)]

    def best(self, budget: float) -> int:
        """Returns the place of the lowest loss among the runs of a budget."""
        return lowest(self.runs[budget])

    @property
    def edges(self) -> list[float]:
        """The budgets whose lowest loss has fewer than `SIDE` sizes on a side."""
        return [
            budget
            for budget, runs in self.runs.items()
            if math.isfinite(runs[self.best(budget)].loss)
            and not SIDE <= self.best(budget) < len(runs) - SIDE
        ]


def train_grid(grid: Grid, engine: Engine) -> Scaling:
    """Trains a grid and fits a law to its runs. Raises `ValueError` for a grid that repeats the data too often."""

    def needed() -> dict[float, list[Run]]:
        return {budget: grid.runs(budget, engine) for budget in grid.budgets}

    def missing() -> list[Trial]:
        runs = [run for own in needed().values() for run in own]
        return [run.trial for run in runs if not engine.knows(run.trial)]

    while trials := missing():
        engine.run(trials)
    outcome = Scaling(grid, needed(), engine.failed)
    outcome.law = fit_runs(outcome)
    return outcome


def fit_runs(outcome: Scaling) -> FittedLaw | None:
    """Fits a law; returns None for too few runs."""
    runs, config = outcome.finished, outcome.grid.base.config
    rows = [(float(r.parameters()), float(r.tokens), r.loss, r.budget) for r in runs]
    N, D, losses, budgets = np.array(rows).reshape(-1, 4).T
    kinds = len(set(N)) >= FEWEST_SIZES and len(set(budgets)) >= FEWEST_BUDGETS
    if not (kinds and len(runs) >= FEWEST_RUNS):
        return None
    tokenizer = outcome.grid.manifest["tokenizer"]
    return FittedLaw(
        **fit(N, D, losses, budgets),
        architecture=config.architecture or "gpt2",
        vocab_size=tokenizer["vocab_size"],
        n_positions=config.tokens_per_sequence,
        tokenizer=tokenizer["fingerprint"],
        data=data_fingerprint(config.data_dir),
        flops=float(max(run.tokens * run.trial.flops_per_token for run in runs)),
        rules=asdict(outcome.grid.rules),
    )


class Best(NamedTuple):
    """The best size with a number of FLOPs: N and D with their 95% intervals."""

    N: float
    D: float
    N_interval: tuple[float, float]
    D_interval: tuple[float, float]


def best_size(law: FittedLaw, flops: float) -> Best:
    """Returns the size and the tokens of the lowest loss with `flops` FLOPs."""

    def chosen(law_: ScalingLaw) -> tuple[np.ndarray, np.ndarray]:
        place = law_.best(flops, law.sizes)
        return law.sizes.N[place], flops / law.sizes.flops[place]

    N, D = chosen(law.point)
    intervals = map(bootstrap_interval, chosen(law.drawn))
    return Best(float(N), float(D), *intervals)


def flops_per_second(grid: Grid, engine: Engine, device: str | None) -> float:
    """Returns the FLOP/s of training: of a GPU in `GPUS` at the typical share of its peak, or of this machine with a run in
    each slot, measured with a middle size of the largest budget.

    Raises `ValueError` if the measurement fails."""
    if device is not None:
        return GPUS[device].peak_flops * TYPICAL_MFU
    budget = max(grid.budgets)
    trial = grid.run(grid.first(budget)[SIDE], budget).trial
    return engine.tokens_per_second(trial) * trial.flops_per_token * len(engine.slots)


def memory(run: Run) -> int:
    """Returns the estimated bytes that training a run takes."""
    config = run.trial.config
    parts = memory_by_part(config, run.shape, Launch(), config.micro_batch_size, None)
    return sum(parts.values())


def best_run(outcome: Scaling, flops: float) -> Run:
    """Returns the run of the lowest predicted loss with `flops` FLOPs among all sizes that can be trained."""
    law, grid = outcome.law, outcome.grid
    place = int(law.point.best(flops, law.sizes))
    return with_budget(grid.base.changed(**sizes()[place]), flops, grid.rules)
