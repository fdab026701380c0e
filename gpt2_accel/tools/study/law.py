"""A scaling law: fits L(N, D) = E + A/N^alpha + B/D^beta to runs, draws laws for intervals, tests the form, and predicts.

L is the loss in nats per token of N parameters, all of them, after D tokens (Hoffmann et al., 2022, arXiv:2203.15556,
approach 3). For each (alpha, beta) the best E, A, B >= 0 are a linear problem, and SciPy searches (alpha, beta) on what this
leaves (variable projection; Golub and Pereyra, 1973). Parabolas through runs of equal FLOPs would be biased even without
noise (arXiv:2603.22339). N, D and the losses are float64 arrays of shape (runs,); a law is E, A, alpha, B, beta, (5,).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from gpt2_accel.evals.results import markdown

UNKNOWNS = ("E", "A", "alpha", "B", "beta")
STARTS = [*itertools.product((0.2, 0.4, 0.8), repeat=2)]  # of alpha and beta
LEAST, MOST = 0.02, 3.0  # of both
SAMPLES = 400
# Few runs vary less in refits than in truth: without it, simulated 95% intervals cover in 93% to 95% of studies, with it in 95%
# to 97% (1,000 studies of each of two grids).
WIDER = 1.1
LEVEL = 0.05  # probability that the tests of the form refuse one that is right
NOISE = [NormalDist().inv_cdf((k + 0.5) / 50) for k in range(50)]  # a normal distribution


def loss_of(law: Sequence, N: Any, D: Any) -> Any:
    """Returns the loss in nats per token of N parameters after D tokens. `law` is E, A, alpha, B, beta: numbers, or arrays of
    shape (laws, 1) for many laws."""
    E, A, alpha, B, beta = law
    return E + A * N**-alpha + B * D**-beta


def bootstrap_interval(samples: np.ndarray) -> tuple[float, float]:
    """Returns the 95% interval of bootstrap samples of any shape."""
    low, high = np.quantile(samples, (0.025, 0.975))
    return float(low), float(high)


@dataclass(frozen=True)
class FittedLaw:
    """A law that was fitted to runs, as `law.json` records it.

    `law` has E, A, alpha, B, beta; `samples` are draws of these and of the standard deviation of one run's noise in nats per
    token, from the bootstrap; `spread` is that of the residuals. `form` has the p-values of `form_test` by budget and by
    size, as far as the tests are possible.
    """

    law: list[float]
    samples: list[list[float]]
    spread: float
    form: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether no test refuses the law's form. If one does, no interval has a stated coverage."""
        return bool(self.form) and min(self.form.values()) >= LEVEL / len(self.form)

    def interval(self, N: float, D: float) -> tuple[float, float]:
        """Returns the 95% interval of the loss of one run, if the form `holds`: the uncertainty of the law, and a run's noise."""
        *drawn, noise = np.array(self.samples).T[:, :, None]
        return bootstrap_interval(loss_of(drawn, N, D) + noise * NOISE)

    def table(self) -> str:
        """Returns the law as a Markdown table; without intervals if the form does not hold."""
        rows = {}
        for name, value, drawn in zip(UNKNOWNS, self.law, np.array(self.samples).T, strict=False):
            low, high = bootstrap_interval(drawn)
            rows[name] = [f"{value:.4g}", f"{low:.4g} to {high:.4g}" if self.holds else "none"]
        return markdown(("law", "value", "95% interval"), rows)

    def remark(self) -> str:
        """Returns whether the law's form holds over its runs."""
        tests = ", ".join(f"by {name} p = {p:.2g}" for name, p in self.form.items())
        tests = f"F tests of the residuals' means {tests or 'need more runs'}"
        if self.holds:
            return f"no test refuses the form of the law: {tests}; the residuals spread by {self.spread:.4f} nats"
        return (
            f"do not extrapolate this law: its form does not hold over its own runs, and no interval covers that error ({tests}); add a "
            "larger budget and leave out the smallest"
        )


def fit(N: np.ndarray, D: np.ndarray, losses: np.ndarray, budgets: np.ndarray) -> FittedLaw:
    """Fits a law to runs, whose `budgets` are in FLOPs."""
    law, spread = fit_law(N, D, losses)
    groups = {"budget": budgets, "size": N}
    tests = {name: form_test(N, D, losses, law, own) for name, own in groups.items()}
    form = {name: p for name, p in tests.items() if p is not None}
    return FittedLaw(law.tolist(), bootstrap(N, D, law, spread).tolist(), spread, form)


def fit_law(
    N: np.ndarray,
    D: np.ndarray,
    losses: np.ndarray,
    starts: Sequence[tuple[float, float]] = STARTS,
) -> tuple[np.ndarray, float]:
    """Returns the law of the least squared residuals over all `starts` of (alpha, beta), and the standard deviation of the
    residuals in nats, with the degrees of freedom of five unknowns."""
    from scipy.optimize import least_squares, nnls

    def linear(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        alpha, beta = np.exp(theta)
        X = np.stack([np.ones_like(losses), N**-alpha, D**-beta], 1)
        size = X.max(0)  # so that the columns of the linear problem are of one size
        c = nnls(X / size, losses)[0] / size
        return c, losses - X @ c

    fits = [
        least_squares(lambda theta: linear(theta)[1], np.log(start), bounds=np.log([LEAST, MOST]))
        for start in starts
    ]
    best = min(fits, key=lambda fit: fit.cost)
    alpha, beta = np.exp(best.x)
    E, A, B = linear(best.x)[0]
    spread = math.sqrt(2 * best.cost / max(1, len(N) - len(UNKNOWNS)))
    return np.array([E, A, alpha, B, beta]), spread


def bootstrap(
    N: np.ndarray, D: np.ndarray, law: np.ndarray, spread: float, samples: int = SAMPLES
) -> np.ndarray:
    """Returns draws of the law and of the standard deviation of the noise, (samples, 6), by the parametric bootstrap: the law's
    losses with fresh normal noise, fitted again. The standard deviation of a draw is `WIDER` times `spread` over the root of
    chi-squared over its degrees of freedom, as in Student's t.

    If the form is right and the noise normal and of one size, 2.5% and 97.5% quantiles cover the truth in at least 95% of
    studies (tests/tools/study/test_law.py).
    """
    random, free = np.random.default_rng(0), max(1, len(N) - len(UNKNOWNS))
    start = np.clip(law[[2, 4]], 1.01 * LEAST, 0.99 * MOST)
    found = []
    for _ in range(samples):
        noise = WIDER * spread * math.sqrt(free / random.chisquare(free))
        losses = loss_of(law, N, D) + noise * random.normal(size=len(N))
        found.append([*fit_law(N, D, losses, [start])[0], noise])
    return np.array(found)


def form_test(
    N: np.ndarray, D: np.ndarray, losses: np.ndarray, law: np.ndarray, groups: np.ndarray
) -> float | None:
    """Returns the p-value of the F test that the residuals have no mean of their own in any of `groups`, (runs,), such as
    the budgets; None with too few runs for it.

    The residuals are regressed on the law's derivatives, without and with an indicator of each group.
    """
    from scipy.stats import f

    _, _, alpha, _, beta = law
    by_N, by_D = N**-alpha, D**-beta
    X = np.stack([np.ones_like(N), by_N, by_N * np.log(N), by_D, by_D * np.log(D)], 1)
    X /= X.max(0)
    residuals = losses - loss_of(law, N, D)

    def regress(X: np.ndarray) -> tuple[float, int]:
        c, _, rank, _ = np.linalg.lstsq(X, residuals, rcond=1e-8)
        return ((residuals - X @ c) ** 2).sum(), int(rank)

    without, rank = regress(X)
    rest, full = regress(np.hstack([X, groups[:, None] == np.unique(groups)]))
    free = len(N) - full
    if full == rank or free < 1:
        return None
    return float(f.sf((without - rest) / (full - rank) / (rest / free), full - rank, free))
