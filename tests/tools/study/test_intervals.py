"""The intervals and verdicts of a study."""

import math
import random

import pytest
from launching import ROOT
from scipy.stats import ttest_1samp

from gpt2_accel.tools.study.intervals import MOST_SEEDS, interval, judge, more_seeds
from gpt2_accel.tools.study.trials import read_table


def test_the_interval_is_students():
    values = [1.0, 1.2, 0.9, 1.4]
    mean, half = interval(values)
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert interval([2.0]) == (2.0, math.inf)


def test_verdicts():
    assert judge([-0.2, -0.21, -0.19]) == "better"
    assert judge([0.2, 0.21, 0.19]) == "worse"
    assert judge([0.0, 0.0]) == "equal"
    assert "at least two" in judge([0.3])
    differences = [0.1, -0.05, 0.06]
    more = more_seeds(differences)
    assert judge(differences) == f"not distinguishable: about {more} more seeds"
    # With that many more pairs of this mean and spread the interval excludes zero, with one fewer it does not.
    mean, spread = 0.11 / 3, 0.0777
    for count, excluded in ((3 + more, True), (2 + more, False)):
        values = [random.Random(i).gauss(0, 1) for i in range(count)]
        centre = sum(values) / count
        scale = math.sqrt(sum((v - centre) ** 2 for v in values) / (count - 1))
        found = judge([mean + spread * (v - centre) / scale for v in values])
        assert found.startswith("worse" if excluded else "not distinguishable")
    assert f"even {MOST_SEEDS:,} seeds" in judge([1.0, -1.0, 0.001])


def test_equal_variants_are_told_apart_in_one_case_of_twenty():
    """Pairs of two groups of runs of the same settings, which differ in their seeds only."""
    table = read_table(ROOT / "tests/tools/study/equal_runs.csv")
    losses = [result.loss for result in table.values()]
    assert len(losses) == len(set(losses)) >= 60
    draw, found, count = random.Random(0), 0, 2000
    for _ in range(count):
        seeds = draw.choice((3, 5, 8))
        drawn = draw.sample(losses, 2 * seeds)
        pairs = zip(drawn[:seeds], drawn[seeds:], strict=True)
        found += judge([a - b for a, b in pairs]) in ("better", "worse")
    assert 0.03 <= found / count <= 0.07
