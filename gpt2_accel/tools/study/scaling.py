"""Scaling laws: trains sizes with equal FLOPs (Hoffmann et al., 2022, arXiv:2203.15556, approach 2), and fits a law to all runs.

The runs of a budget grow until at least two sizes lie on each side of the one with the lowest loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from gpt2_accel.data.shards import read_manifest
from gpt2_accel.tools.study.engine import Engine
from gpt2_accel.tools.study.law import FittedLaw, fit, loss_of
from gpt2_accel.tools.study.trials import Trial

# Up to 8,192, from 64 on four in each doubling.
WIDTHS = (16, 32, 48, *(m * 2**k for k in range(4, 11) for m in (4, 5, 6, 7)), 8192)
SIDE = 2  # sizes on each side of the lowest loss
TOKENS_PER_PARAMETER = 20  # of the middle one of a budget's first sizes
FEWEST_UPDATES = 20  # of a run that a law can learn from
FEWEST_RUNS, FEWEST_BUDGETS = 8, 2  # for a fit
MAX_EPOCHS = 4.0  # up to which repeated data is about as good as new (Muennighoff et al., 2023, arXiv:2305.16264)
# At a width of 64 and 2,048 tokens per update. It falls as width^-WIDTH_EXPONENT, as measured at widths of 32 to 128 with 1M
# tokens (docs/scaling.md).
LEARNING_RATE, WIDTH_EXPONENT = 0.0165, 0.5
WEIGHT_DECAY = 0.3  # of a run of 2M tokens with 2,048 per update
BATCH_EXPONENT = 0.383  # the batch grows as tokens^BATCH_EXPONENT
TOKENS, BATCH, WIDTH = 2_000_000, 2048, 64  # at which rate, decay and batch are meant
WARMUP_SHARE = 0.01  # share of the updates
QUIET = {"eval_every": 10**9, "sample_every": 0}  # only the last update is evaluated
FIXED = {"optimizer": "muon", "lr_schedule": "linear", "min_lr_ratio": 0.0, "beta2": 0.99}


def size_of(width: int) -> dict[str, int]:
    """Returns the settings of a width: a layer per 64 of it but at least two, heads of 16 channels up to a width of 256 and of 64
    above."""
    head = 16 if width <= 256 else 64
    return {"n_layer": max(2, round(width / 64)), "n_head": width // head, "n_embd": width}


def batch_for(tokens: float, length: int) -> int:
    """Returns the tokens per update of a run of `tokens` tokens in sequences of `length`: they grow as tokens^0.383 (Bergsma et
    al., 2025, arXiv:2505.13738), rounded to a power of two of sequences."""
    sequences = BATCH / length * (tokens / TOKENS) ** BATCH_EXPONENT
    return length * 2 ** max(0, round(math.log2(sequences)))


def settings_for(width: int, tokens: float, batch: int, learning_rate: float) -> dict[str, Any]:
    """Returns the settings of a run of about `tokens` tokens, `batch` of them per update. `learning_rate` is the peak at a width
    of 64 with 2,048 tokens per update.

    The rate grows as the square root of the batch (Malladi et al., 2022, arXiv:2205.10287) and the inverse root of the
    width; the decay grows as the square root of the batch and falls as the tokens, as in nanochat.
    """
    updates, root = max(1, round(tokens / batch)), math.sqrt(batch / BATCH)
    rate = learning_rate * root * (WIDTH / width) ** WIDTH_EXPONENT
    return {
        **FIXED,
        "total_batch_size": batch,
        "max_steps": updates,
        "warmup_steps": round(WARMUP_SHARE * updates),
        "learning_rate": float(f"{rate:.4g}"),
        "weight_decay": float(f"{WEIGHT_DECAY * root * TOKENS / tokens:.4g}"),
    }


@dataclass(frozen=True)
class Grid:
    """The runs of a scaling study: for each of `budgets`, in FLOPs, sizes of `WIDTHS`, which `engine` trains.

    `base` is the trial that all runs share, `learning_rate` that of `settings_for`. No run has fewer than `FEWEST_UPDATES`, or reads
    the data more than `max_epochs` times.
    """

    base: Trial
    engine: Engine
    budgets: Sequence[float]
    learning_rate: float = LEARNING_RATE
    max_epochs: float = MAX_EPOCHS

    def trial(self, width: int, budget: float) -> Trial:
        """Returns the run of a width with the tokens that a budget pays for, in whole updates."""
        sized = self.base.changed(f"{budget:.3g}-width{width}", **size_of(width))
        tokens = budget / sized.flops_per_token
        batch = batch_for(tokens, sized.config.tokens_per_sequence)
        return sized.changed(**settings_for(width, tokens, batch, self.learning_rate))

    def best(self, law: FittedLaw, flops: float) -> Trial:
        """Returns the run of the lowest loss by a law with `flops` FLOPs."""
        trials = [self.trial(width, flops) for width in WIDTHS]
        return min(
            trials,
            key=lambda t: loss_of(
                law.law, float(t.shape.parameter_count), flops / t.flops_per_token
            ),
        )

    def words(self, trial: Trial, name: str) -> list[str]:
        """Returns the command line that trains a run alone, in a folder `name`, with evaluations and samples on the way."""
        changes = {n: value for n, value in trial.changes.items() if n not in QUIET}
        return replace(trial, changes=changes).arguments(self.engine.folder / name)

    def loss(self, trial: Trial) -> float:
        """Returns the loss in nats per token, infinite if the run diverged or has no result."""
        result = self.engine.results.get(trial.id)
        return math.inf if result is None else result.loss

    def lowest(self, trials: Sequence[Trial]) -> int:
        """Returns the place of the lowest loss."""
        return min(range(len(trials)), key=lambda place: self.loss(trials[place]))

    def epochs(self, trial: Trial) -> float:
        """Returns how often a run reads the training data."""
        manifest = read_manifest(self.base.config.data_dir)
        return trial.tokens / manifest["splits"]["train"]["tokens"]

    def allowed(self, trial: Trial) -> bool:
        """Whether a run has enough updates and does not read the data too often."""
        enough = trial.config.max_steps >= FEWEST_UPDATES
        return enough and self.epochs(trial) <= self.max_epochs

    @cached_property
    def possible(self) -> dict[float, list[Trial]]:
        """The runs that each budget may have, from the smallest. Raises `ValueError` if one of the first is not allowed."""
        found = {}
        for budget in self.budgets:
            trials = [self.trial(width, budget) for width in WIDTHS]
            low, high = first(trials)
            for trial in (trials[low], trials[high - 1]):
                if not self.allowed(trial):
                    raise ValueError(
                        f"with {budget:.3g} FLOPs a width of {trial.config.n_embd} trains {trial.config.max_steps} updates and "
                        f"reads the data {self.epochs(trial):.2g} times, and a run needs {FEWEST_UPDATES} updates and may read it "
                        f"{self.max_epochs:g} times: prepare more text, change --budgets, or raise --max_epochs"
                    )
            found[budget] = [trial for trial in trials if self.allowed(trial)]
        return found

    @property
    def runs(self) -> dict[float, list[Trial]]:
        """The runs of each budget by size, as far as the results tell which ones are needed."""
        found = {}
        for budget, trials in self.possible.items():
            low, high = first(trials)
            while all(map(self.engine.knows, trials[low:high])):
                best = low + self.lowest(trials[low:high])
                wider = max(0, min(low, best - SIDE)), min(len(trials), max(high, best + SIDE + 1))
                if wider == (low, high):
                    break
                low, high = wider
            found[budget] = trials[low:high]
        return found

    def left(self) -> list[Trial]:
        """Returns the needed runs that have not been trained."""
        return [t for trials in self.runs.values() for t in trials if not self.engine.knows(t)]

    def train(self) -> FittedLaw | None:
        """Trains the runs and fits a law to those with a loss; returns None if they are too few for a fit."""
        while left := self.left():
            self.engine.run(left)
        rows = [
            (trial.shape.parameter_count, trial.tokens, self.loss(trial), budget)
            for budget, trials in self.runs.items()
            for trial in trials
            if math.isfinite(self.loss(trial))
        ]
        if len(rows) < FEWEST_RUNS or len({budget for *_, budget in rows}) < FEWEST_BUDGETS:
            return None
        return fit(*np.array(rows).T)


def first(trials: Sequence[Trial]) -> tuple[int, int]:
    """Returns where the runs that a budget begins with start and end: the one next to `TOKENS_PER_PARAMETER` in their middle."""
    ratios = [
        abs(math.log(t.tokens / (TOKENS_PER_PARAMETER * t.shape.parameter_count))) for t in trials
    ]
    middle = min(max(ratios.index(min(ratios)), SIDE), len(trials) - 1 - SIDE)
    return middle - SIDE, middle + SIDE + 1
