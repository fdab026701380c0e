"""95% intervals: how often they hold the true value, and how they are written."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from tables import table

from gpt2_accel.evals.core import core_of
from gpt2_accel.evals.formulas import mean, number

CASES = table("evals/intervals")
TASKS = [SimpleNamespace(name=i, guessing=i % 3 / 4) for i in range(22)]


def share(random, n, p, name="x"):
    k = random.binomial(n, p)
    return p, mean([1] * k + [0] * (n - k), name=name)


def loss(random, n, spread):
    sizes = random.integers(16, 33, n)
    nats = random.gamma(spread**-2, spread**2, n) * sizes
    return 1, mean(nats.tolist(), sizes.tolist())


def reward(random, n, p):
    """Of eight samples of each task."""
    return p, mean((random.binomial(8, random.beta(p, 1 - p, n)) / 8).tolist())


def core(random, n, p):
    results = {}
    for task in TASKS:
        results |= share(random, n, p, f"core/{task.name}")[1]
    return core_of(TASKS, dict.fromkeys(results, p))["core/core"], core_of(TASKS, results)


KINDS = [
    (share, np.arange(1, 100, 2) / 100),
    (loss, CASES["spreads"]),
    (reward, [0.3, 0.5, 0.7]),
    (core, [0.1, 0.9]),
]


def held(truth, results):
    value, *others = map(float, re.findall(r"-?\d+\.\d+", number(results, next(iter(results)))))
    low, high = others if others[1:] else (value - others[0], value + others[0])
    return low <= truth <= high


@pytest.mark.parametrize(("draw", "cases"), KINDS)
def test_an_interval_holds_the_true_value(draw, cases):
    random = np.random.default_rng(1)
    for n in (20, 200):
        shares = [np.mean([held(*draw(random, n, case)) for _ in range(500)]) for case in cases]
        assert 0.93 < np.mean(shares) < 0.975
        assert min(shares) > 0.9


@pytest.mark.parametrize(("values", "text"), CASES["written"])
def test_a_figure_is_written_with_its_interval(values, text):
    assert number(dict(zip(("x", "x_stderr", "x_stderr_n"), values, strict=False)), "x") == text
