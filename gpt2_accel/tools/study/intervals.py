"""Student's t-intervals over paired runs, exact tests of counts, the verdict on a difference."""

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

CONFIDENCE = 0.95
LEVEL = 0.05  # of studies of equal variants may find that one diverged more or less often
MOST_SEEDS = 1000  # a difference that needs more is called equal to zero for all purposes


def half_width(spread: float, count: Any) -> Any:
    """Returns half the width of the 95% interval of a mean, by Student's t, from the standard deviation of `count` values, a
    number or an array."""
    from scipy.stats import t

    return t.ppf((1 + CONFIDENCE) / 2, count - 1) * spread / np.sqrt(count)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least one value, and half the width of its 95% interval, infinite for one value."""
    if len(values) < 2:
        return values[0], math.inf
    return fmean(values), float(half_width(stdev(values), len(values)))


def plus_minus(values: Sequence[float], form: str = ".4f") -> str:
    """Formats the mean of values and its interval: 3.9260 ± 0.0051; only the mean of one value."""
    mean, half = interval(values)
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
    found = np.exp(logs).tolist()
    return f"< {fmean(found):.0%}" if (goals > lowest[0]).any() else plus_minus(found, ".1%")


@functools.cache
def fisher(counts: tuple[int, int], others: tuple[int, int]) -> float:
    """Returns the two-sided p-value of Fisher's exact test that two groups of runs diverge equally
    often. Each has the number of runs that diverged, and of those that did not."""
    from scipy.stats import fisher_exact

    return float(fisher_exact([counts, others]).pvalue)


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Returns the p-values after Holm's correction for their number (1979), which may exceed 1."""
    corrected = {}
    highest = 0.0
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        highest = max(highest, (len(p_values) - rank) * p_values[key])
        corrected[key] = highest
    return corrected


def judge(differences: Sequence[float]) -> str:
    """Returns the verdict on the differences of pairs of runs with the same seed; lower is better.

    It is "better" or "worse" if the 95% interval excludes zero, "equal" if every pair is equal, or "not distinguishable",
    with the number of `more_seeds`.
    """
    if not differences:
        return "no pair of runs"
    if len(differences) < 2:
        return "not distinguishable: one seed has no spread, take at least two"
    if not any(differences):
        return "equal"
    mean, half = interval(differences)
    if abs(mean) > half:
        return "better" if mean < 0 else "worse"
    more = more_seeds(differences)
    if more is None:
        return f"not distinguishable: even {MOST_SEEDS:,} seeds may not tell them apart"
    return f"not distinguishable: about {more} more seed{'s' * (more > 1)}"


def more_seeds(differences: Sequence[float]) -> int | None:
    """Returns how many more pairs would make an interval of this mean and spread exclude zero; None if with them they are more
    than `MOST_SEEDS`."""
    counts = np.arange(len(differences) + 1, MOST_SEEDS + 1)
    enough = abs(fmean(differences)) > half_width(stdev(differences), counts)
    return int(counts[enough.argmax()]) - len(differences) if enough.any() else None
