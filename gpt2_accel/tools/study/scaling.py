"""Scaling laws: trains models of several sizes with equal FLOPs, fits L(N, D) = E + A/N^alpha +
B/D^beta to all runs, and predicts a larger run.

L is the loss in nats per token, N the number of all parameters, D the number of tokens (Hoffmann et
al., 2022, arXiv:2203.15556: sizes as in approach 2, the fit as in approach 3). N, D and losses are
float64 arrays of shape (runs,).
"""

import math
import shlex
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import approx_fprime, curve_fit
from scipy.stats import f_oneway, t

from gpt2_accel.tools.study.runs import Trial, arguments, read_trial

# Four in each doubling from 64 on.
WIDTHS = [16, 32, 48]
WIDTHS += [(4 + number % 4) * 16 * 2 ** (number // 4) for number in range(28)]
TOKENS_PER_PARAMETER = 20  # ratio of the middle size
# The reference run, of 2M tokens: width, tokens per update, weight decay.
TOKENS = 2_000_000
BATCH = 2048
WIDTH = 64
WEIGHT_DECAY = 0.3
FIXED = {"optimizer": "muon", "lr_schedule": "linear", "min_lr_ratio": 0.0, "beta2": 0.99}
NAMES = ("E", "A", "alpha", "B", "beta")
START = (1, 1e2, 0.4, 1e3, 0.4)
LEVEL = 0.05  # p-value below which a law gives no interval


class Law(NamedTuple):
    """A fitted law.

    `values` are E, A, alpha, B, beta; their `covariance`, (5, 5), is a first-order estimate.
    `spread` is the standard deviation of the residuals in nats, with `free` degrees of freedom.
    `form` is the p-value of an analysis of variance of the residuals by budget. The fit absorbs
    some of the differences between budgets, so less than 5% of the studies refuse a right form.
    """

    values: np.ndarray
    covariance: np.ndarray
    spread: float
    free: int
    form: float

    def half_width(self, N: float, D: float) -> float:
        """Returns half the width of the 95% interval of the loss of a run, if the form holds.

        Student's t, with the first-order uncertainty of the law and the noise of one run.
        """
        slope = approx_fprime(self.values, lambda values: loss_of((N, D), *values))
        variance = self.spread**2 + slope @ self.covariance @ slope
        return t.ppf(0.975, self.free) * math.sqrt(variance)


def loss_of(run: Any, E: float, A: float, alpha: float, B: float, beta: float) -> Any:
    """Returns the loss in nats per token of runs (N, D) by a law."""
    N, D = run
    return E + A * N**-alpha + B * D**-beta


def fit_law(N: np.ndarray, D: np.ndarray, losses: np.ndarray, budgets: np.ndarray) -> Law:
    """Fits a law to runs with `budgets` in FLOPs by least squares.

    Parabolas through runs of equal FLOPs are biased even without noise (arXiv:2603.22339). Raises
    `ValueError` for too few runs.
    """
    if len(N) < 8:
        raise ValueError("a law needs 8 runs or more that neither failed nor diverged")
    values, covariance = curve_fit(
        loss_of, (N, D), losses, START, bounds=(0, np.inf), x_scale="jac", max_nfev=10_000
    )
    residuals = losses - loss_of((N, D), *values)
    free = len(N) - len(values)
    spread = math.sqrt(residuals @ residuals / free)
    groups = [residuals[budgets == budget] for budget in np.unique(budgets)]
    return Law(values, covariance, spread, free, f_oneway(*groups).pvalue)


def size_of(width: int) -> dict[str, int]:
    """Returns the settings of a width: one layer per 64 channels, at least two; heads of 16
    channels up to a width of 256, of 64 above."""
    head = 16 if width <= 256 else 64
    return {"n_layer": max(2, round(width / 64)), "n_head": width // head, "n_embd": width}


def settings_for(size: Trial, flops: float, learning_rate: float) -> dict[str, Any]:
    """Returns the settings of a run of a size with as many full updates as `flops` allow.
    `learning_rate` is the peak at a width of 64 with 2,048 tokens per update.

    The batch grows as tokens^0.383 (Bergsma et al., 2025, arXiv:2505.13738), rounded to a power of
    two sequences. The rate is proportional to the square root of the batch (Malladi et al., 2022,
    arXiv:2205.10287) and inversely to the square root of the width, as measured at widths of 32 to
    128 with 1M tokens (docs/scaling.md). The weight decay is proportional to the square root of the
    batch and inversely to the tokens, as in nanochat.
    """
    tokens = flops / size.flops_per_token
    length = size.config.tokens_per_sequence
    sequences = BATCH / length * (tokens / TOKENS) ** 0.383
    batch = length * 2 ** max(0, round(math.log2(sequences)))
    updates = max(1, round(tokens / batch))
    root = math.sqrt(batch / BATCH)
    rate = learning_rate * root * math.sqrt(WIDTH / size.config.n_embd)
    return (
        size.changes
        | FIXED
        | {
            "total_batch_size": batch,
            "max_steps": updates,
            "warmup_steps": round(updates / 100),
            "learning_rate": float(f"{rate:.4g}"),
            "weight_decay": float(f"{WEIGHT_DECAY * root * TOKENS / tokens:.4g}"),
        }
    )


def grid(
    sizes: list[Trial], budgets: list[float], count: int, learning_rate: float
) -> list[tuple[Trial, float]]:
    """Returns the runs of a study with their budgets in FLOPs: for each budget, `count` of the
    `sizes` around `TOKENS_PER_PARAMETER`. `learning_rate` as in `settings_for`."""
    runs = []
    for budget in budgets:
        # FLOPs of each size with that many tokens.
        best = [TOKENS_PER_PARAMETER * s.shape.parameter_count * s.flops_per_token for s in sizes]
        away = [abs(math.log(flops / budget)) for flops in best]
        low = max(0, away.index(min(away)) - count // 2)
        for size in sizes[low : low + count]:
            settings = settings_for(size, budget, learning_rate)
            settings |= {"eval_every": 10**9, "sample_every": 0}  # evaluates the last update only
            runs.append((read_trial(size.recipe, f"{budget:.3g}-{size.label}", settings), budget))
    return runs


def fit_runs(grid: list[tuple[Trial, float]], losses: np.ndarray) -> Law:
    """Fits a law to the runs of a `grid` that have ended with a loss."""
    ended = np.isfinite(losses)
    points = [(trial.shape.parameter_count, trial.tokens, budget) for trial, budget in grid]
    N, D, budgets = np.array(points, float)[ended].T
    return fit_law(N, D, losses[ended], budgets)


def predict(law: Law, sizes: list[Trial], flops: float, learning_rate: float) -> str:
    """Returns the best run of `flops` FLOPs by a law, its predicted loss and its command."""
    runs = [(size.shape.parameter_count, flops / size.flops_per_token) for size in sizes]
    losses = [loss_of(run, *law.values) for run in runs]
    best = np.argmin(losses)
    N, D = runs[best]
    half = f"± {law.half_width(N, D):.4f} (95%)" if law.form >= LEVEL else "without an interval"
    settings = settings_for(sizes[best], flops, learning_rate)
    command = shlex.join(arguments(settings, f"runs/best-{flops:.3g}"))
    return (
        f"the best run with {flops:.3g} FLOPs has {N:,} parameters and {D:.3g} tokens: val/loss "
        f"{losses[best]:.4f} {half}\n\ntrain it: gpt2-accel {sizes[best].recipe.stem} {command}"
    )
