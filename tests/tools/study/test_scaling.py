"""Scaling laws: the fit on simulated runs, the settings, the sizes, and the recipe."""

import itertools
import math
import re
import shlex

import numpy as np
import pytest
from conftest import long, read_json
from launching import ROOT, python

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.estimate.dry_run import estimate_run
from gpt2_accel.tools.study.runs import read_trial
from gpt2_accel.tools.study.scaling import (
    LEVEL,
    fit_law,
    grid,
    loss_of,
    predict,
    settings_for,
    size_of,
)

RECIPE = ROOT / "recipes/scaling_laws.py"
LAW = (1.0, 40.0, 0.3, 60.0, 0.3)
BESIROGLU = (1.8172, 482.01, 0.3478, 2085.43, 0.3658)  # arXiv:2404.10102
STUDIES = 60  # simulated


def true_loss(law, N, D):
    E, A, alpha, B, beta = law
    return E + A * N**-alpha + B * D**-beta


def isoflop(budgets, count=7, ratio=1.6):
    """Returns N, D and C = 6ND of sizes around the best ones by the law of Besiroglu et al."""
    _, A, alpha, B, beta = BESIROGLU
    scale = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    C = np.repeat(budgets, count)
    steps = np.tile(np.arange(count) - (count - 1) / 2, len(budgets))
    N = scale * (C / 6) ** (beta / (alpha + beta)) * ratio**steps
    return N, C / 6 / N, C


def test_a_law_is_found_exactly_and_never_has_a_negative_term():
    N, D, C = isoflop([1e18, 1e19])
    law = fit_law(N, D, true_loss(BESIROGLU, N, D), C)
    assert law.values == pytest.approx(BESIROGLU, rel=1e-6)
    assert law.spread < 1e-8
    without_data_term = fit_law(N, D, 2 + 300 * N**-0.3, C)
    assert without_data_term.values[:3] == pytest.approx((2, 300, 0.3), rel=1e-4)
    assert loss_of((1, D), 0, 0, 0, *without_data_term.values[3:]).max() < 1e-6
    assert min(fit_law(N, D, 2 - 300 * N**-0.3, C).values) >= 0  # rises with N


@long
def test_intervals_cover_the_truth_and_the_form_is_seldom_refused_if_it_is_right():
    """Simulated grids of 21 runs with noise, and a new run of ten times the largest budget.

    Of 400 studies, in two minutes, 381 were covered, and 9 refused the right form.
    """
    N, D, C = isoflop([1e18, 3e18, 1e19])
    random = np.random.default_rng(1)
    hits = []
    refusals = []
    [size], [tokens], _ = isoflop([1e20], count=1)
    for _ in range(STUDIES):
        law = fit_law(N, D, true_loss(BESIROGLU, N, D) + random.normal(0, 0.005, len(N)), C)
        new = true_loss(BESIROGLU, size, tokens) + random.normal(0, 0.005)
        hits.append(abs(new - loss_of((size, tokens), *law.values)) <= law.half_width(size, tokens))
        refusals.append(law.form < 0.05)
    slack = 3 * math.sqrt(0.95 * 0.05 / STUDIES)
    assert 0.95 - slack <= np.mean(hits) <= 0.95 + slack
    assert np.mean(refusals) <= 0.05 + slack


@pytest.fixture(scope="module")
def sizes(data_dir):
    """A trial of each of the first widths."""
    settings = {"data_dir": str(data_dir), "n_positions": 32}
    trials = []
    for width in (16, 32, 48, 64, 80, 96, 112, 128, 160):
        own = settings | size_of(width)
        trials.append(read_trial(ROOT / "recipes/quickstart.py", f"width{width}", own))
    return trials


def test_settings_follow_the_scaling_rules(sizes):
    def settings(width, tokens):
        [size] = [size for size in sizes if size.config.n_embd == width]
        return settings_for(size, tokens * size.flops_per_token, 0.0165)

    base = settings(64, 2e6)
    assert base["total_batch_size"] == 2048
    assert base["max_steps"] == 977
    assert base["learning_rate"] == 0.0165
    assert base["weight_decay"] == 0.3
    assert base["warmup_steps"] == 10
    assert base["optimizer"] == "muon"
    assert settings(64, 10)["total_batch_size"] == 32
    wide = settings(128, 2e6 * 4 ** (1 / 0.383))
    assert wide["total_batch_size"] == 8192
    # Twice by the batch, a root of two less by the width.
    assert wide["learning_rate"] == pytest.approx(2**0.5 * 0.0165, rel=1e-3)


def test_the_sizes_of_a_budget_have_equal_flops(sizes):
    runs = [trial for trial, _ in grid(sizes, [1e12], 5, 0.0165)]
    assert len(runs) == 5
    parameters = [run.shape.parameter_count for run in runs]
    assert all(1.2 < b / a < 3.2 for a, b in itertools.pairwise(parameters))
    ratios = [run.tokens / run.shape.parameter_count for run in runs]
    assert ratios[1] > 20 > ratios[3]
    for run in runs:  # up to half an update
        batch = run.config.total_batch_size * run.flops_per_token
        assert abs(run.tokens * run.flops_per_token - 1e12) <= batch / 2


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_a_law_whose_form_does_not_hold_is_not_to_be_extrapolated(shift, sizes):
    random = np.random.default_rng(0)
    N, D, C = isoflop([1e11, 1e12, 1e13])
    losses = true_loss(LAW, N, D) + shift * (C == 1e12) + random.normal(0, 0.005, len(N))
    law = fit_law(N, D, losses, C)
    text = predict(law, sizes, 1e11, 0.0165)
    assert (law.form < LEVEL) == bool(shift)
    assert ("without an interval" in text) == bool(shift)
    # The printed command trains the run that the prediction is for.
    words = shlex.split(re.search("train it: gpt2-accel quickstart (.*)", text)[1])
    config = parse_config(TrainConfig, words)
    N, D = re.search("has ([0-9,]+) parameters and ([0-9.e+]+) tokens", text).groups()
    assert f"{N} parameters" in estimate_run(config)
    assert config.max_steps * config.total_batch_size == pytest.approx(float(D), rel=0.05)
    best = true_loss(law.values, int(N.replace(",", "")), float(D))
    # The printed tokens have three digits.
    assert float(re.search("val/loss ([0-9.]+)", text)[1]) == pytest.approx(best, abs=3e-3)
    for size in sizes:
        tokens = 1e11 / size.flops_per_token
        assert true_loss(law.values, size.shape.parameter_count, tokens) >= best - 2e-3


@long
def test_the_recipe_writes_its_table_its_law_and_the_best_run(data_dir, tmp_path):
    options = ["--n_positions", "32", "--max_epochs", "99", "--sizes", "5", "--eval_tokens", "1024"]
    options += ["--data_dir", data_dir, "--budgets", "1e10", "2e10", "--target_flops", "1e11"]
    planned = python(RECIPE, *options, "--dry_run", "true")
    assert planned.stdout.count(" FLOPs") == 10, planned.stderr
    done = python(RECIPE, *options, "--output_dir", tmp_path)
    assert (tmp_path / "scaling.md").read_text().strip() in done.stdout
    assert (tmp_path / "runs.csv").read_text().count("\n") == 11
    record = read_json(tmp_path / "law.json")
    assert list(record["law"]) == ["E", "A", "alpha", "B", "beta"]
    assert record["settings"]["n_positions"] == 32
