"""Student's t-intervals over paired runs, exact tests of counts, the verdict on a difference."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

CONFIDENCE = 0.95
LEVEL = 0.05  # of studies of equal variants may find that one diverged more or less often
MOST_SEEDS = 1000  # a difference that needs more is called equal to zero for all purposes


@functools.cache
def student(runs: int) -> float:
    """Returns the two-sided quantile of Student's t with `runs` - 1 degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, runs - 1))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least one value, and half the width of its 95% interval, infinite for one value."""
    if len(values) < 2:
        return fmean(values), math.inf
    return fmean(values), student(len(values)) * stdev(values) / math.sqrt(len(values))


def plus_minus(mean: float, half: float, form: str = ".4f") -> str:
    """Formats an interval: 3.9260 ± 0.0051; without a spread only the mean."""
    return f"{mean:{form}}" + ("" if math.isinf(half) else f" ± {half:{form.lstrip('+')}}")


def reached(goals: np.ndarray, losses: np.ndarray, shares: np.ndarray) -> str:
    """Returns the share of tokens with which losses reach those of others, as text: mean over the seeds and half the width of
    the 95% interval, or a bound if a seed reaches its goal outside of the budgets. Interpolates over the logarithm.

    Args:
        goals: the others' losses, of shape (seeds,).
        losses: by budget from the smallest, of shape (budgets, seeds).
        shares: the tokens of each budget as a share of the others', of shape (budgets,).
    """
    lowest = np.minimum.accumulate(losses)
    if (goals < lowest[-1]).any():
        return f"> {shares[-1]:.0%}"
    logs = [
        np.interp(-goal, -own, np.log(shares)) for goal, own in zip(goals, lowest.T, strict=True)
    ]
    mean, half = interval(np.exp(logs).tolist())
    return f"< {mean:.0%}" if (goals > lowest[0]).any() else plus_minus(mean, half, ".1%")


@functools.cache
def fisher(counts: tuple[int, int], others: tuple[int, int]) -> float:
    """Returns the two-sided p-value of Fisher's exact test that two groups of runs diverge equally
    often. Each has the number of runs that diverged, and of those that did not."""
    from scipy.stats import fisher_exact

    return float(fisher_exact([counts, others]).pvalue)


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Returns the p-values after Holm's correction for their number (1979), which may exceed 1."""
    corrected, highest = {}, 0.0
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        highest = max(highest, (len(p_values) - rank) * p_values[key])
        corrected[key] = highest
    return corrected


@dataclass(frozen=True)
class Verdict:
    """What the paired differences of a variant's metric to the baseline's say; lower is better.

    `mean` and `half` are the 95% interval. `word` is "better", "worse", or "equal" if every pair is
    equal; or "not distinguishable", with the number of `more_seeds` after which an interval of this
    mean and spread would exclude zero, None if it is above `MOST_SEEDS` or there is one pair only;
    or a verdict without an interval, which is NaN then.
    """

    word: str
    mean: float = math.nan
    half: float = math.nan
    more_seeds: int | None = None

    def __str__(self) -> str:
        if self.word != "not distinguishable":
            return self.word
        if math.isinf(self.half):
            return f"{self.word}: one seed has no spread, take at least two"
        if self.more_seeds is None:
            return f"{self.word}: even {MOST_SEEDS:,} seeds may not tell them apart"
        return f"{self.word}: about {self.more_seeds} more seed{'s' * (self.more_seeds > 1)}"


def judge(differences: Sequence[float]) -> Verdict:
    """Returns the verdict on the differences of pairs of runs with the same seed."""
    if not differences:
        return Verdict("no pair of runs")
    mean, half = interval(differences)
    if len(differences) > 1 and not any(differences):
        return Verdict("equal", 0.0, 0.0)
    if abs(mean) > half:
        return Verdict("better" if mean < 0 else "worse", mean, half)
    return Verdict("not distinguishable", mean, half, more_seeds(differences))


def more_seeds(differences: Sequence[float]) -> int | None:
    """Returns how many more pairs would make an interval of this mean and spread exclude zero."""
    if len(differences) < 2:
        return None
    mean, spread = abs(fmean(differences)), stdev(differences)
    for count in range(len(differences) + 1, MOST_SEEDS + 1):
        if mean > student(count) * spread / math.sqrt(count):
            return count - len(differences)
    return None
