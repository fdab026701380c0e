"""Scaling laws: trains sizes with equal FLOPs (Hoffmann et al., 2022, arXiv:2203.15556, approach 2), and fits a law to all runs."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2_accel.data.shards import read_manifest
from gpt2_accel.hf.loss_plot import COLOURS, add_legend, new_figure, short_number
from gpt2_accel.tools.study.engine import Engine
from gpt2_accel.tools.study.law import FittedLaw, fit, loss_of
from gpt2_accel.tools.study.trials import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Up to 8,192, from 64 on four in each doubling.
WIDTHS = (16, 32, 48, *(m * 2**k for k in range(4, 11) for m in (4, 5, 6, 7)), 8192)
SIZES = 7  # of each budget
TOKENS_PER_PARAMETER = 20  # of the middle one of them
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
    updates = max(1, round(tokens / batch))
    root = math.sqrt(batch / BATCH)
    rate = learning_rate * root * (WIDTH / width) ** WIDTH_EXPONENT
    return FIXED | {
        "total_batch_size": batch,
        "max_steps": updates,
        "warmup_steps": round(WARMUP_SHARE * updates),
        "learning_rate": float(f"{rate:.4g}"),
        "weight_decay": float(f"{WEIGHT_DECAY * root * TOKENS / tokens:.4g}"),
    }


@dataclass
class Grid:
    """The runs of a scaling study: for each of `budgets`, in FLOPs, `sizes` of `WIDTHS`, which `engine` trains.

    `base` is the trial that all runs share, `learning_rate` that of `settings_for`. Raises `ValueError` for a run with fewer than
    `FEWEST_UPDATES`, or that reads the data more than `max_epochs` times.
    """

    base: Trial
    engine: Engine
    budgets: Sequence[float]
    sizes: int = SIZES
    learning_rate: float = LEARNING_RATE
    max_epochs: float = MAX_EPOCHS

    def __post_init__(self) -> None:
        self.data_tokens = read_manifest(self.base.config.data_dir)["splits"]["train"]["tokens"]
        self.by_budget = {budget: self.runs_of(budget) for budget in self.budgets}
        self.runs = [*chain.from_iterable(self.by_budget.values())]

    def trial(self, width: int, budget: float, **changes: Any) -> Trial:
        """Returns the run of a width with the tokens that a budget pays for, in whole updates, and other changed settings."""
        label = f"{budget:.3g}-width{width}"
        sized = self.base.changed(label, **size_of(width), **changes)
        tokens = budget / sized.flops_per_token
        batch = batch_for(tokens, sized.config.tokens_per_sequence)
        return sized.changed(label, **settings_for(width, tokens, batch, self.learning_rate))

    def runs_of(self, budget: float) -> list[Trial]:
        """Returns the runs of a budget, from the smallest: around `TOKENS_PER_PARAMETER`."""
        trials = [self.trial(width, budget, **QUIET) for width in WIDTHS]
        ratios = [t.tokens / (TOKENS_PER_PARAMETER * t.shape.parameter_count) for t in trials]
        middle = int(np.argmin(np.abs(np.log(ratios))))
        low = max(0, middle - self.sizes // 2)
        chosen = trials[low : low + self.sizes]
        for trial in chosen:
            if trial.config.max_steps < FEWEST_UPDATES or self.epochs(trial) > self.max_epochs:
                raise ValueError(
                    f"with {budget:.3g} FLOPs a width of {trial.config.n_embd} trains {trial.config.max_steps} updates and "
                    f"reads the data {self.epochs(trial):.2g} times, and a run needs {FEWEST_UPDATES} updates and may read it "
                    f"{self.max_epochs:g} times: prepare more text, change --budgets or --sizes, or raise --max_epochs"
                )
        return chosen

    def epochs(self, trial: Trial) -> float:
        """Returns how often a run reads the training data."""
        return trial.tokens / self.data_tokens

    def points(self) -> np.ndarray:
        """Returns parameters, tokens, loss and budget of each run, of shape (4, runs)."""
        rows = []
        for budget, trials in self.by_budget.items():
            rows += [
                (t.shape.parameter_count, t.tokens, self.engine.metric(t), budget) for t in trials
            ]
        return np.array(rows, float).T

    def train(self) -> FittedLaw | None:
        """Trains the runs and fits a law to those with a loss; returns None if they are too few for a fit."""
        self.engine.run(self.runs)
        points = self.points()
        points = points[:, np.isfinite(points[2])]
        if points.shape[1] < FEWEST_RUNS or len({*points[3]}) < FEWEST_BUDGETS:
            return None
        return fit(*points)

    def best(self, law: FittedLaw, flops: float) -> Trial:
        """Returns the run of the lowest loss by a law with `flops` FLOPs."""

        def loss(trial: Trial) -> float:
            N = float(trial.shape.parameter_count)
            return loss_of(law.law, N, flops / trial.flops_per_token)

        return min((self.trial(width, flops) for width in WIDTHS), key=loss)

    def text(self, law: FittedLaw | None, target: float | None) -> str:
        """Returns the outcome as Markdown: the law, its remarks, with the best run of `target` FLOPs, the runs."""
        parts = ["Law"]
        if law is None:
            lines = [
                f"no law: a fit needs at least {FEWEST_RUNS} finished runs and {FEWEST_BUDGETS} budgets"
            ]
        else:
            parts.append(law.table())
            lines = [law.remark()]
            if target:
                lines += self.target_remarks(law, target)
        for budget, trials in self.by_budget.items():
            lowest = min(trials, key=self.engine.metric)
            if lowest in (trials[0], trials[-1]):
                lines.append(
                    f"with {short_number(budget, True)} FLOPs the lowest loss is at the end of the sizes: its minimum is not certain: "
                    "give other --sizes or --budgets"
                )
        lines += self.engine.caveats(self.runs)
        bullets = "\n".join(f"- {line}" for line in lines)
        parts += [bullets, "Runs", self.engine.runs_table(self.runs)]
        return "\n\n".join(parts)

    def target_remarks(self, law: FittedLaw, flops: float) -> list[str]:
        """Returns the best run with `flops` FLOPs, its predicted loss, and its command, or that there is none."""
        _, A, _, B, _ = law.law
        if A == 0 or B == 0:
            return ["the law has no best size, since a term is 0: add a larger budget"]
        run = self.best(law, flops)
        command = run.arguments(self.engine.folder / f"best-{flops:.3g}")
        N, D, epochs = run.shape.parameter_count, run.tokens, self.epochs(run)
        sure = "without an interval, since the law does not fit its own runs"
        if law.holds:
            sure = "95% interval {:.4f} to {:.4f}".format(*law.interval(N, D))
        lines = [
            f"the best run with {short_number(flops, True)} FLOPs, {flops / self.budgets[-1]:.3g} times the largest budget, has "
            f"{short_number(N)} parameters and {short_number(D)} tokens, {epochs:.2g} times the data: "
            f"val/loss {loss_of(law.law, N, D):.4f}, {sure}, by these settings and on this text",
            f"train it: gpt2-accel {shlex.join([run.recipe.stem, *command])}",
        ]
        if epochs > self.max_epochs:
            lines.append("the law knows no repetition of data: prepare more text for the best run")
        return lines

    def figure(self, law: FittedLaw | None) -> "Figure":
        """Draws the loss over the size for each budget, with the law's."""
        figure, ax = new_figure(
            "val/loss in nats per token by budget in FLOPs; lines: the fitted law"
        )
        points = self.points()
        for budget, colour in zip(self.budgets, cycle(COLOURS), strict=False):
            N, D, losses, _ = points[:, points[3] == budget]
            ax.plot(N, losses, "o", color=colour, markersize=4, label=short_number(budget, True))
            if law:
                ax.plot(N, loss_of(law.law, N, D), linewidth=1.3, color=colour)
        ax.set_xscale("log")
        ax.set_xlabel("parameters")
        add_legend(ax)
        return figure
