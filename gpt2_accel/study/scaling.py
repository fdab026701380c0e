"""Scaling laws: trains sizes with equal FLOPs (Hoffmann et al., 2022, arXiv:2203.15556, approach 2), and fits a law to all runs.

The grid of a budget grows until at least two sizes lie on each side of the one with the lowest loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gpt2_accel.data.shards import read_manifest
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.estimate.law import (
    LEARNING_RATE,
    MAX_EPOCHS,
    FittedLaw,
    batch_for,
    loss_of,
    settings_for,
)
from gpt2_accel.models.architectures import configured_shape
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.law_fit import fit
from gpt2_accel.study.trials import Result, Trial

# Up to 8,192, from 64 on four in each doubling.
WIDTHS = (16, 32, 48, *(m * 2**k for k in range(4, 11) for m in (4, 5, 6, 7)), 8192)
SIDE = 2  # sizes on each side of the lowest loss
TOKENS_PER_PARAMETER = 20  # of the middle one of a budget's first sizes
FEWEST_UPDATES = 20  # of a run that a law can learn from
FEWEST_RUNS, FEWEST_BUDGETS = 8, 2  # for a fit


def size_of(width: int) -> dict[str, int]:
    """Returns the settings of a width: a layer per 64 of it but at least two, heads of 16 channels up to a width of 256 and of 64
    above."""
    head = 16 if width <= 256 else 64
    return {"n_layer": max(2, round(width / 64)), "n_head": width // head, "n_embd": width}


class Run(NamedTuple):
    """A run of the grid: its budget in FLOPs, N, the trial, and its result, None if it failed."""

    budget: float
    N: float
    trial: Trial
    result: Result | None = None

    @property
    def loss(self) -> float:
        """The loss in nats per token, infinite if the run failed or diverged."""
        return math.inf if self.result is None else self.result.loss

    @property
    def tokens(self) -> int:
        return self.trial.tokens


@dataclass(frozen=True)
class Grid:
    """The runs of a scaling study: for each of `budgets`, in FLOPs, sizes of `WIDTHS`.

    `base` is the trial that all runs share, `learning_rate` that of `settings_for`. No run has fewer than `FEWEST_UPDATES`, or reads
    the data more than `max_epochs` times.
    """

    base: Trial
    budgets: Sequence[float]
    learning_rate: float = LEARNING_RATE
    max_epochs: float = MAX_EPOCHS

    @cached_property
    def manifest(self) -> dict:
        return read_manifest(self.base.config.data_dir)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """N and the FLOPs per token of all `WIDTHS`, (widths,) float64."""
        config, vocab_size = self.base.config, self.manifest["tokenizer"]["vocab_size"]
        shapes = [configured_shape(replace(config, **size_of(w)), vocab_size) for w in WIDTHS]
        each = [flops_per_token(shape, config.tokens_per_sequence) for shape in shapes]
        return np.array([float(s.parameter_count) for s in shapes]), np.array(each, dtype=float)

    def run(self, place: int, budget: float) -> Run:
        """Returns the run of the width at a place in `WIDTHS`, with the tokens that a budget pays for, in whole updates."""
        width, (N, flops) = WIDTHS[place], self.sizes
        tokens = budget / flops[place]
        batch = batch_for(tokens, self.base.config.tokens_per_sequence)
        settings = size_of(width) | settings_for(width, tokens, batch, self.learning_rate)
        label = f"{budget:.3g}-width{width}"
        return Run(budget, N[place], self.base.changed(label=label, **settings))

    def best(self, law: FittedLaw, flops: float) -> Run:
        """Returns the run of the lowest loss by a law with `flops` FLOPs."""
        N, each = self.sizes
        return self.run(int(np.argmin(loss_of(law.law, N, flops / each))), flops)

    def epochs(self, run: Run) -> float:
        """Returns how often a run reads the training data."""
        return run.tokens / self.manifest["splits"]["train"]["tokens"]

    def allowed(self, run: Run) -> bool:
        """Whether a run has enough updates and does not read the data too often."""
        return run.trial.config.max_steps >= FEWEST_UPDATES and self.epochs(run) <= self.max_epochs

    @cached_property
    def possible(self) -> dict[float, list[Run]]:
        """The runs that each budget may have, from the smallest. Raises `ValueError` if one of the first is not allowed."""
        found = {}
        for budget in self.budgets:
            runs = [self.run(place, budget) for place in range(len(WIDTHS))]
            low, high = first(runs)
            for run in (runs[low], runs[high - 1]):
                if not self.allowed(run):
                    raise ValueError(
                        f"with {budget:.3g} FLOPs a width of {run.trial.config.n_embd} trains {run.trial.config.max_steps} updates and "
                        f"reads the data {self.epochs(run):.2g} times, and a run needs {FEWEST_UPDATES} updates and may read it "
                        f"{self.max_epochs:g} times: prepare more text, change --budgets, or raise --max_epochs"
                    )
            found[budget] = [run for run in runs if self.allowed(run)]
        return found

    def runs(self, budget: float, engine: Engine) -> list[Run]:
        """Returns the runs of a budget by size, as far as the engine's results tell which ones are needed."""
        runs = [
            run._replace(result=engine.results.get(run.trial.id)) for run in self.possible[budget]
        ]
        low, high = first(runs)
        while all(engine.knows(run.trial) for run in runs[low:high]):
            best = low + lowest(runs[low:high])
            wider = max(0, min(low, best - SIDE)), min(len(runs), max(high, best + SIDE + 1))
            if wider == (low, high):
                break
            low, high = wider
        return runs[low:high]


def first(runs: Sequence[Run]) -> tuple[int, int]:
    """Returns where the runs that a budget begins with start and end: the one next to `TOKENS_PER_PARAMETER` in their middle."""
    ratios = [abs(math.log(run.tokens / (TOKENS_PER_PARAMETER * run.N))) for run in runs]
    middle = min(max(ratios.index(min(ratios)), SIDE), len(runs) - 1 - SIDE)
    return middle - SIDE, middle + SIDE + 1


def lowest(runs: Sequence[Run]) -> int:
    """Returns the place of the lowest loss."""
    return min(range(len(runs)), key=lambda place: runs[place].loss)


@dataclass
class Scaling:
    """The outcome of a scaling study: its runs, and the law, None if there are too few runs."""

    grid: Grid
    runs: list[Run]
    law: FittedLaw | None = None

    def of(self, budget: float) -> list[Run]:
        """Returns the runs of a budget, from the smallest size."""
        return [run for run in self.runs if run.budget == budget]


def needed(grid: Grid, engine: Engine) -> list[Run]:
    """Returns the runs of all budgets, as far as the results tell."""
    return [run for budget in grid.budgets for run in grid.runs(budget, engine)]


def train_grid(grid: Grid, engine: Engine) -> Scaling:
    """Trains a grid and fits a law to its runs. Raises `ValueError` for a budget with too few possible runs."""
    runs = needed(grid, engine)
    while missing := [run.trial for run in runs if not engine.knows(run.trial)]:
        engine.run(missing)
        runs = needed(grid, engine)
    return Scaling(grid, runs, fit_runs(grid, runs))


def fit_runs(grid: Grid, runs: Sequence[Run]) -> FittedLaw | None:
    """Fits a law to the runs with a loss; returns None for too few of them."""
    finished, config = [run for run in runs if math.isfinite(run.loss)], grid.base.config
    if len(finished) < FEWEST_RUNS or len({run.budget for run in finished}) < FEWEST_BUDGETS:
        return None
    rows = [(run.N, run.tokens, run.loss, run.budget) for run in finished]
    return FittedLaw(
        **fit(*np.array(rows).T),
        architecture=config.architecture or "gpt2",
        n_positions=config.tokens_per_sequence,
        tokenizer=grid.manifest["tokenizer"]["fingerprint"],
        flops=float(max(run.tokens * run.trial.flops_per_token for run in finished)),
        learning_rate=grid.learning_rate,
    )
