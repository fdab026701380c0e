"""Tuning on a loss that is a formula, and the tokens with which a loss is reached."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2_accel.config import TrainConfig
from gpt2_accel.study.compare import Comparison
from gpt2_accel.study.trials import Result, Trial
from gpt2_accel.study.tune import AT_ONCE, Tuning

RATES = [1e-3 * 2 ** (k / 2) for k in range(-6, 7)]
AXES = {
    "learning_rate": RATES,
    "total_batch_size": [1024, 2048, 4096],
    "lr_schedule": ["constant", "cosine", "linear"],
    "weight_decay": [0.0, 0.1, 0.3],
}


def bowl(trial):
    """Is lowest at a rate of 4e-3 and 4,096 tokens, with a linear schedule and no decay; a run with 0.3 fails."""
    settings = trial.resolved
    if settings["weight_decay"] == 0.3:
        return math.inf
    rate = math.log2(settings["learning_rate"] / 4e-3)
    batch = math.log2(settings["total_batch_size"] / 4096)
    return rate**2 + batch**2 + (settings["lr_schedule"] != "linear") + settings["weight_decay"]


def tuning(axes, trials, loss):
    settings = TrainConfig(learning_rate=1e-3, total_batch_size=1024).settings()
    return Tuning(Trial(Path("recipe.py"), {}, settings), axes, trials, loss)


def points(found):
    return [tuple(trial.resolved[name] for name in AXES) for trial in found.tried()]


def test_few_combinations_are_all_tried():
    axes = {name: AXES[name] for name in ("total_batch_size", "weight_decay")}
    found = tuning(axes, 9, bowl)
    assert len(found.tried()) == 9
    best = found.best().resolved
    assert (best["total_batch_size"], best["weight_decay"]) == (4096, 0.0)
    assert found.at_end() == ["total_batch_size"]  # not a decay of 0


def test_many_are_suggested_by_the_losses_before_and_none_twice():
    known = {}

    def loss(trial):
        return known.get(repr(trial.resolved))

    found = tuning(AXES, 30, loss)
    while len(found.tried()) > len(known):
        before = points(found)
        assert len(before) - len(known) <= AT_ONCE
        for trial in found.tried():  # the others are not suggested again
            known.setdefault(repr(trial.resolved), bowl(trial))
        assert points(found)[: len(before)] == before
    assert len(set(points(found))) == 30
    assert points(found)[0] == (1e-3, 1024, "cosine", 0.1)  # the variant as it is
    assert bowl(found.best()) < 1.5  # random points would have a median of the lowest of 2.1
    assert points(tuning(AXES, 30, bowl)) == points(found)


@pytest.mark.parametrize(
    "losses, expected",
    [
        ((5.0, 4.6, 4.4), "70.7%"),  # between two budgets
        ((5.0, 4.4, 4.6), "44.5%"),  # the first time
        ((4.4, 4.3, 4.2), "< 25%"),
        ((5.0, 5.1, 5.0), "> 100%"),
        ((5.0, math.inf, 4.5), "100.0%"),
    ],
)
def test_the_share_of_tokens_with_which_a_loss_is_reached(losses, expected):
    def results(own):
        rows = zip((100, 200, 400), own, strict=True)
        return {t: [Result(f"{i}{t}", "", 1, 1, t, 1.0, x) for i in (1, 2)] for t, x in rows}

    study = SimpleNamespace(baseline="base", budgets=[100, 200, 400], metric="loss")
    both = {"base": results((6.0, 5.5, 4.5)), "own": results(losses)}
    found = {(name, t): own for name, of in both.items() for t, own in of.items()}
    assert Comparison(study, found).token_share("own").startswith(expected)
