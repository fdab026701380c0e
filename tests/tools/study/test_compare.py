"""What a study says: intervals, verdicts, and what its file may hold."""

import math

import numpy as np
import pytest
from launching import ROOT
from scipy.stats import ttest_1samp

from gpt2_accel.tools.study.compare import (
    judge,
    outcome,
    plus_minus,
    read_study,
    seed_trials,
    tuning_trials,
)


def test_the_interval_is_that_of_scipy():
    values = [1.0, 1.2, 0.9, 1.4]
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert plus_minus(values) == f"{(low + high) / 2:.4f} ± {(high - low) / 2:.4f}"
    assert plus_minus([2.0], "+.4f") == "+2.0000"
    assert plus_minus([]) == "none"


def test_judge_gives_a_verdict():
    assert judge([-0.2, -0.21, -0.19]) == "better"
    assert judge([0.2, 0.21, 0.19]) == "worse"
    assert judge([0.0, 0.0]) == "equal"
    assert "two pairs of runs" in judge([])
    assert "two pairs of runs" in judge([0.3])
    # 0.0367 ± 0.1931, and ± 0.0365 with the spread of 10 such groups.
    assert judge([0.1, -0.05, 0.06]) == "not distinguishable"
    assert judge([0.1, -0.05, 0.06] * 10) == "worse"


def test_a_run_that_diverged_or_failed_is_in_no_pair():
    variant, base = np.array([[math.inf, 1.0, 1.1, 1.0], [math.nan, 2.0, 2.05, 2.0]])
    cells = outcome(variant, base)
    assert (cells[0], cells[3]) == ("1 diverged, 0 of the baseline; better", "3")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes/studies").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_shipped_studies_have_possible_settings(path, data_dir):
    study = read_study(path, ROOT / "recipes")
    study.settings["data_dir"] = str(data_dir)
    study.seeds = 1
    trials = tuning_trials(study)
    assert len(trials) == len(study.variants) * (5 if study.tune else 0)
    for budget in study.budgets:
        trials += seed_trials(study, {}, budget, [1])
    assert min(trial.config.max_steps for trial in trials) >= 73  # 75,000 tokens of 1,024
    assert len({trial.id for trial in trials}) == len(trials)
