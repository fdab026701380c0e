"""Coordinate descent, on a loss that is a formula."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2_accel.config import TrainConfig
from gpt2_accel.study.compare import tokens_to
from gpt2_accel.study.engine import Trial
from gpt2_accel.study.table import Result
from gpt2_accel.study.tune import Descent

RATES = [1e-3 * 2 ** (k / 2) for k in range(-6, 7)]
AXES = {
    "learning_rate": RATES,
    "total_batch_size": [1024, 2048, 4096],
    "lr_schedule": ["constant", "cosine", "linear"],
    "weight_decay": [0.0, 0.1, 0.3],
}
PLAIN = Result("", "", 1, 1, 1, 1.0, 0.0)


def start(**changes):
    settings = TrainConfig(learning_rate=1e-3, total_batch_size=1024, **changes).settings()
    return Trial(Path("recipe.py"), {}, settings)


def descend(loss, axes, budget=None):
    """Runs a descent; returns its outcome and the trials in their order."""
    seen = []
    plan = Descent(start(), axes, budget, lambda trial: trial, lambda result: result.loss).plan()
    trials = next(plan)
    while True:
        seen += trials
        results = [
            None if loss(t.resolved) is None else replace(PLAIN, loss=loss(t.resolved))
            for t in trials
        ]
        try:
            trials = plan.send(results)
        except StopIteration as end:
            return end.value, seen


def bowl(settings):
    """Is lowest at a rate of 4e-3 and 4,096 tokens, with a linear schedule and no decay; a run with 0.3 fails."""
    if settings["weight_decay"] == 0.3:
        return None
    rate = math.log2(settings["learning_rate"] / 4e-3)
    batch = math.log2(settings["total_batch_size"] / 4096)
    return rate**2 + batch**2 + (settings["lr_schedule"] != "linear") + settings["weight_decay"]


def test_the_descent_finds_the_best_settings_and_says_that_no_step_helps():
    tuned, seen = descend(bowl, AXES)
    assert tuned.converged and tuned.loss == pytest.approx(0)
    found = [tuned.trial.resolved[name] for name in AXES]
    assert found == [pytest.approx(4e-3), 4096, "linear", 0.0]
    assert tuned.at_end == ["total_batch_size"]  # not the schedule, and not a decay of 0
    assert tuned.trials == len({str([t.resolved[n] for n in AXES]) for t in seen})


def test_a_budget_is_the_number_of_different_trials():
    for budget in (2, 5, 9):
        tuned, seen = descend(bowl, AXES, budget)
        different = {str([t.resolved[n] for n in AXES]) for t in seen}
        assert len(different) == tuned.trials == budget and not tuned.converged


def test_the_rate_follows_the_batch_by_the_square_root():
    _, seen = descend(
        lambda settings: 0.0, {n: AXES[n] for n in ("total_batch_size", "learning_rate")}
    )
    larger = next(t for t in seen if t.resolved["total_batch_size"] == 2048)
    assert larger.resolved["learning_rate"] == pytest.approx(1e-3 * math.sqrt(2))


def test_a_value_out_of_its_range_is_refused():
    with pytest.raises(ValueError, match="weight_decay must not be negative"):
        start().changed(weight_decay=-1.0)


@pytest.mark.parametrize(
    "losses, expected",
    [
        ((5.0, 4.6, 4.4), 282.84),  # between two budgets
        ((5.0, 4.4, 4.6), 178.18),  # the first time
        ((4.4, 4.3, 4.2), 50.0),  # the line of the first two goes on
        ((4.4, 4.4, 4.4), 100.0),
        ((5.0, 5.1, 5.0), math.inf),  # in no budget
        ((5.0, 5.0, 5.0), math.inf),
    ],
)
def test_tokens_with_which_a_loss_is_reached(losses, expected):
    assert tokens_to(4.5, [100, 200, 400], losses) == pytest.approx(expected, rel=1e-3)


def test_a_rate_of_zero_does_not_scale_with_the_batch():
    rates = {**AXES, "learning_rate": [0.0, *RATES]}
    tuned, _ = descend(lambda s: s["learning_rate"] + s["total_batch_size"] / 1024, rates)
    assert tuned.trial.resolved["learning_rate"] == 0.0
    assert tuned.trial.resolved["total_batch_size"] == 1024
