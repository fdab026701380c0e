"""Scaling laws: trains models of several sizes with equal FLOPs, fits L(N, D) = E + A/N^alpha +
B/D^beta to all runs, and predicts a larger run.

L is the loss in nats per token, N the number of all parameters, D the number of tokens (Hoffmann et
al., 2022, arXiv:2203.15556: sizes as in approach 2, the fit as in approach 3). N, D and losses are
float64 arrays of shape (runs,).
"""

import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt2_accel.data.shards import read_manifest
from gpt2_accel.evals.results import markdown
from gpt2_accel.hf.loss_plot import COLOURS, Figure, add_legend, new_figure, short_number
from gpt2_accel.tools.study.runs import Queue
from gpt2_accel.tools.study.trials import Trial, arguments

# Four in each doubling from 64 on.
WIDTHS = [16, 32, 48]
for doubling in range(7):
    WIDTHS += [quarter * 16 * 2**doubling for quarter in (4, 5, 6, 7)]
WIDTHS.append(8192)
SIZES = 7  # sizes per budget
TOKENS_PER_PARAMETER = 20  # ratio of the middle size
FEWEST_UPDATES = 20  # minimum of a run
FEWEST_RUNS = 8  # minimum for a fit
FEWEST_BUDGETS = 2
# Data that is repeated more often is worth less (Muennighoff et al., 2023, arXiv:2305.16264).
MAX_EPOCHS = 4.0
# At a width of 64 and 2,048 tokens per update. It falls as width^-WIDTH_EXPONENT, as measured at
# widths of 32 to 128 with 1M tokens (docs/scaling.md).
LEARNING_RATE = 0.0165
WIDTH_EXPONENT = 0.5
WEIGHT_DECAY = 0.3  # the decay of a run of 2M tokens, 2,048 per update
BATCH_EXPONENT = 0.383  # the batch grows as tokens^BATCH_EXPONENT
TOKENS = 2_000_000  # tokens of the reference run, which has this rate, decay and batch
BATCH = 2048
WIDTH = 64
WARMUP_SHARE = 0.01  # share of the updates
STARTS = list(itertools.product((0.2, 0.4, 0.8), repeat=2))  # (alpha, beta)
LEAST = 0.02  # bounds of alpha and beta
MOST = 3.0
EXACT = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-14, "max_nfev": 10_000}
ZERO = 1e-6  # nats below which a term of the law counts as 0
LEVEL = 0.05  # p-value below which a law gives no interval
QUIET = {"eval_every": 10**9, "sample_every": 0}  # only the last update is evaluated
FIXED = {"optimizer": "muon", "lr_schedule": "linear", "min_lr_ratio": 0.0, "beta2": 0.99}


def size_of(width: int) -> dict[str, int]:
    """Returns the settings of a width: one layer per 64 channels, at least two; heads of 16
    channels up to a width of 256, of 64 above."""
    head = 16 if width <= 256 else 64
    return {"n_layer": max(2, round(width / 64)), "n_head": width // head, "n_embd": width}


def batch_for(tokens: float, length: int) -> int:
    """Returns the tokens per update of a run of `tokens` tokens in sequences of `length` tokens.

    The batch grows as tokens^0.383 (Bergsma et al., 2025, arXiv:2505.13738), rounded to a power of
    two sequences.
    """
    sequences = BATCH / length * (tokens / TOKENS) ** BATCH_EXPONENT
    return length * 2 ** max(0, round(math.log2(sequences)))


def settings_for(width: int, tokens: float, batch: int, learning_rate: float) -> dict[str, Any]:
    """Returns the settings of a run of about `tokens` tokens, `batch` tokens per update.
    `learning_rate` is the peak at a width of 64 with 2,048 tokens per update.

    The rate is proportional to the square root of the batch (Malladi et al., 2022,
    arXiv:2205.10287) and inversely to the square root of the width. The weight decay is
    proportional to the square root of the batch and inversely to the tokens, as in nanochat.
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
class Law:
    """A fitted law.

    `values` are E, a, alpha, b, beta of the loss E + a (N/N0)^-alpha + b (D/D0)^-beta; `centre` is
    (N0, D0). `covariance` of `values`, (5, 5), is a first-order estimate. `spread` is the standard
    deviation of the residuals in nats, with `free` degrees of freedom. `form` is the p-value of an
    analysis of variance of the residuals by budget. The fit absorbs some of the differences between
    budgets, so less than 5% of the studies refuse a right form.
    """

    values: np.ndarray
    centre: np.ndarray
    covariance: np.ndarray
    spread: float
    free: int
    form: float

    @property
    def law(self) -> dict[str, float]:
        """E, A, alpha, B and beta of the loss E + A/N^alpha + B/D^beta."""
        E, a, alpha, b, beta = self.values.tolist()
        N0, D0 = self.centre.tolist()
        return {"E": E, "A": a * N0**alpha, "alpha": alpha, "B": b * D0**beta, "beta": beta}

    def loss(self, N: Any, D: Any) -> Any:
        """Returns the loss in nats per token of N parameters after D tokens."""
        N0, D0 = self.centre
        return centred((N / N0, D / D0), *self.values)

    def half_width(self, N: float, D: float) -> float:
        """Returns half the width of the 95% interval of the loss of a run, if the form holds.

        Student's t, with the first-order uncertainty of the law and the noise of one run.
        """
        from scipy.optimize import approx_fprime
        from scipy.stats import t

        ratios = np.array([N, D]) / self.centre
        slope = approx_fprime(self.values, lambda values: centred(ratios, *values))
        variance = self.spread**2 + slope @ self.covariance @ slope
        return float(t.ppf(0.975, self.free) * math.sqrt(variance))


def centred(ratios: Any, E: float, a: float, alpha: float, b: float, beta: float) -> Any:
    """Returns the loss in nats per token at N/N0 and D/D0."""
    n, d = ratios
    return E + a * n**-alpha + b * d**-beta


def fit_law(N: np.ndarray, D: np.ndarray, losses: np.ndarray, budgets: np.ndarray) -> Law:
    """Fits a law to runs with `budgets` in FLOPs by least squares, the best fit from all `STARTS`.

    Parabolas through runs of equal FLOPs are biased even without noise (arXiv:2603.22339).
    """
    from scipy.optimize import curve_fit
    from scipy.stats import f_oneway

    centre = np.exp(np.log([N, D]).mean(1))
    ratios = np.array([N, D]) / centre[:, None]
    limits = [(0, 0, LEAST, 0, LEAST), (np.inf, np.inf, MOST, np.inf, MOST)]
    third = losses.mean() / 3

    fits = []
    for alpha, beta in STARTS:
        start = (third, third, alpha, third, beta)
        values, covariance = curve_fit(centred, ratios, losses, start, bounds=limits, **EXACT)
        residuals = losses - centred(ratios, *values)
        fits.append((float(residuals @ residuals), values, covariance, residuals))
    squares, values, covariance, residuals = min(fits, key=lambda found: found[0])
    free = max(1, len(N) - len(values))
    form = f_oneway(*[residuals[budgets == budget] for budget in np.unique(budgets)]).pvalue
    return Law(values, centre, covariance, math.sqrt(squares / free), free, float(form))


@dataclass
class Grid:
    """The runs of a scaling study, which `queue` trains: `sizes` of `WIDTHS` for each of `budgets`,
    in FLOPs.

    All runs derive from the trial `base`; `learning_rate` as in `settings_for`. Raises `ValueError`
    if a run has fewer than `FEWEST_UPDATES` or reads the data more than `max_epochs` times.
    """

    base: Trial
    queue: Queue
    budgets: Sequence[float]
    sizes: int = SIZES
    learning_rate: float = LEARNING_RATE
    max_epochs: float = MAX_EPOCHS

    def __post_init__(self) -> None:
        self.data_tokens = read_manifest(self.base.config.data_dir)["splits"]["train"]["tokens"]
        self.by_budget = {budget: self.runs_of(budget) for budget in self.budgets}
        self.runs = list(itertools.chain.from_iterable(self.by_budget.values()))

    def trial(self, width: int, budget: float, **changes: Any) -> Trial:
        """Returns the run of a width with as many full updates as a budget allows, and other
        changed settings."""
        label = f"{budget:.3g}-width{width}"
        sized = self.base.changed(label, **size_of(width), **changes)
        tokens = budget / sized.flops_per_token
        batch = batch_for(tokens, sized.config.tokens_per_sequence)
        return sized.changed(label, **settings_for(width, tokens, batch, self.learning_rate))

    def runs_of(self, budget: float) -> list[Trial]:
        """Returns the runs of a budget, the smallest first, around `TOKENS_PER_PARAMETER`."""
        trials = [self.trial(width, budget, **QUIET) for width in WIDTHS]
        ratios = [t.tokens / (TOKENS_PER_PARAMETER * t.shape.parameter_count) for t in trials]
        middle = int(np.argmin(np.abs(np.log(ratios))))
        low = max(0, middle - self.sizes // 2)
        chosen = trials[low : low + self.sizes]
        for trial in chosen:
            updates = trial.config.max_steps
            epochs = self.epochs(trial)
            if updates < FEWEST_UPDATES or epochs > self.max_epochs:
                raise ValueError(
                    f"run {trial.label} has {updates} updates and reads the data {epochs:.2g} "
                    f"times, but a run needs {FEWEST_UPDATES} updates and may read the data "
                    f"{self.max_epochs:g} times: prepare more text, change --budgets or --sizes, "
                    "or raise --max_epochs"
                )
        return chosen

    def epochs(self, trial: Trial) -> float:
        """Returns how many times a run reads the training data."""
        return trial.tokens / self.data_tokens

    def points(self) -> np.ndarray:
        """Returns parameters, tokens, loss and budget of each run with a finite loss, (4, runs)."""
        rows = []
        for budget, trials in self.by_budget.items():
            for trial in trials:
                loss = self.queue.metric(trial)
                if math.isfinite(loss):
                    rows.append((trial.shape.parameter_count, trial.tokens, loss, budget))
        return np.array(rows, float).reshape(-1, 4).T

    def train(self) -> Law | None:
        """Trains the runs and fits a law to those with a finite loss; returns None if there are too
        few."""
        self.queue.run(self.runs)
        points = self.points()
        if points.shape[1] < FEWEST_RUNS or len(set(points[3])) < FEWEST_BUDGETS:
            return None
        return fit_law(*points)

    def best(self, law: Law, flops: float) -> Trial:
        """Returns the run of `flops` FLOPs with the lowest loss by a law."""
        trials = [self.trial(width, flops) for width in WIDTHS]
        losses = [law.loss(t.shape.parameter_count, flops / t.flops_per_token) for t in trials]
        return trials[int(np.argmin(losses))]

    def text(self, law: Law | None, target: float | None) -> str:
        """Returns the outcome as Markdown: the law, remarks, with `target` also the best run of so
        many FLOPs, and a table of the runs."""
        parts = ["Law"]
        lines = []
        if law is None:
            lines.append(
                f"no law: a fit needs at least {FEWEST_RUNS} finished runs and {FEWEST_BUDGETS} "
                "budgets"
            )
        else:
            rows = {name: [f"{value:.4g}"] for name, value in law.law.items()}
            parts.append(markdown(("law", "value"), rows))
            lines.append(
                f"p = {law.form:.2g} that the residuals of all budgets have the same mean: below "
                f"{LEVEL} the law does not fit its own runs, so do not extrapolate it; add a "
                "larger budget and leave out the smallest"
            )
            lines.append(f"standard deviation of the residuals: {law.spread:.4f} nats")
            if target:
                lines += self.target_remarks(law, target)
        for budget, trials in self.by_budget.items():
            lowest = min(trials, key=self.queue.metric)
            if lowest in (trials[0], trials[-1]):
                lines.append(
                    f"with {short_number(budget, True)} FLOPs the lowest loss is at the smallest "
                    "or largest size, so the minimum is uncertain: give other --sizes or --budgets"
                )
        lines += self.queue.caveats(self.runs)
        parts.append("\n".join(f"- {line}" for line in lines))
        parts += ["Runs", self.queue.runs_table(self.runs)]
        return "\n\n".join(parts)

    def target_remarks(self, law: Law, flops: float) -> list[str]:
        """Returns the best run with `flops` FLOPs, its predicted loss and its command, or that a
        best size does not exist."""
        if min(law.values[[1, 3]]) < ZERO:
            return ["the law has no best size, since a term is 0: add a larger budget"]
        run = self.best(law, flops)
        command = shlex.join(arguments(run.changes, self.queue.folder / f"best-{flops:.3g}"))
        N = run.shape.parameter_count
        D = run.tokens
        epochs = self.epochs(run)
        interval = "without an interval"
        if law.form >= LEVEL:
            interval = f"95% interval ± {law.half_width(N, D):.4f}"
        lines = [
            f"the best run with {short_number(flops, True)} FLOPs, {flops / self.budgets[-1]:.3g} "
            f"times the largest budget, has {short_number(N)} parameters and {short_number(D)} "
            f"tokens, {epochs:.2g} times the data: val/loss {law.loss(N, D):.4f}, {interval}, with "
            "these settings and this text",
            f"train it: gpt2-accel {run.recipe.stem} {command}",
        ]
        if epochs > self.max_epochs:
            lines.append(
                "the law does not describe repeated data: prepare more text for the best run"
            )
        return lines

    def figure(self, law: Law | None) -> "Figure":
        """Draws the loss of each run over its size, by budget, and the law's loss as lines."""
        figure, ax = new_figure(
            "val/loss in nats per token by budget in FLOPs; lines: the fitted law"
        )
        points = self.points()
        for budget, colour in zip(self.budgets, itertools.cycle(COLOURS), strict=False):
            N, D, losses, _ = points[:, points[3] == budget]
            ax.plot(N, losses, "o", color=colour, markersize=4, label=short_number(budget, True))
            if law:
                ax.plot(N, law.loss(N, D), linewidth=1.3, color=colour)
        ax.set_xscale("log")
        ax.set_xlabel("parameters")
        add_legend(ax)
        return figure
