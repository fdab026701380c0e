"""Scaling laws: the fit on simulated runs, the settings, the grid on a formula, and the recipe."""

import itertools
import math
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import long, read_json, refused
from launching import ROOT, python

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.estimate.dry_run import estimate_run
from gpt2_accel.tools.study import scaling
from gpt2_accel.tools.study.runs import Queue
from gpt2_accel.tools.study.scaling import LEARNING_RATE, Grid, batch_for, fit_law, settings_for
from gpt2_accel.tools.study.trials import Trial

RECIPE = ROOT / "recipes/scaling_laws.py"
LAW = (1.0, 40.0, 0.3, 60.0, 0.3)
BESIROGLU = (1.8172, 482.01, 0.3478, 2085.43, 0.3658)  # arXiv:2404.10102
STUDIES = int(os.environ.get("COVERAGE_STUDIES", "60"))  # simulated


def loss_of(law, N, D):
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
    law = fit_law(N, D, loss_of(BESIROGLU, N, D), C)
    assert list(law.law.values()) == pytest.approx(BESIROGLU, rel=1e-6)
    assert law.spread < 1e-8
    without_data_term = fit_law(N, D, 2 + 300 * N**-0.3, C).law
    expected = pytest.approx({"E": 2, "A": 300, "alpha": 0.3}, rel=1e-4)
    assert {name: without_data_term[name] for name in ("E", "A", "alpha")} == expected
    assert without_data_term["B"] < 1e-6
    assert min(fit_law(N, D, 2 - 300 * N**-0.3, C).law.values()) >= 0  # rises with N


def test_intervals_cover_the_truth_and_the_form_is_seldom_refused_if_it_is_right():
    """Simulated grids of 21 runs with noise, and a new run of ten times the largest budget.

    `COVERAGE_STUDIES=400` takes two minutes: 381 were covered, and 9 refused the right form.
    """
    N, D, C = isoflop([1e18, 3e18, 1e19])
    random = np.random.default_rng(1)
    hits = []
    refusals = []
    [size], [tokens], _ = isoflop([1e20], count=1)
    for _ in range(STUDIES):
        law = fit_law(N, D, loss_of(BESIROGLU, N, D) + random.normal(0, 0.005, len(N)), C)
        new = loss_of(BESIROGLU, size, tokens) + random.normal(0, 0.005)
        hits.append(abs(new - law.loss(size, tokens)) <= law.half_width(size, tokens))
        refusals.append(law.form < 0.05)
    slack = 3 * math.sqrt(0.95 * 0.05 / STUDIES)
    assert 0.95 - slack <= np.mean(hits) <= 0.95 + slack
    assert np.mean(refusals) <= 0.05 + slack


def test_settings_follow_the_scaling_rules():
    assert batch_for(2e6, 128) == 2048
    assert batch_for(10, 128) == 128
    base = settings_for(64, 2e6, 2048, LEARNING_RATE)
    assert base["max_steps"] == 977
    assert base["learning_rate"] == LEARNING_RATE
    assert base["weight_decay"] == 0.3
    assert base["warmup_steps"] == 10
    assert base["optimizer"] == "muon"
    tokens = 2e6 * 4 ** (1 / 0.383)
    assert batch_for(tokens, 128) == 8192
    # Twice by the batch, a root of two less by the width.
    rate = settings_for(128, tokens, 8192, LEARNING_RATE)["learning_rate"]
    assert rate == pytest.approx(2**0.5 * LEARNING_RATE, rel=1e-3)


class Formula(Queue):
    """A queue whose losses are a formula of N, D and the FLOPs."""

    def run(self, trials):
        for one in trials:
            loss = self.loss(float(one.shape.parameter_count), one.tokens, one.flops)
            self.rows[one.id] = {"loss": loss}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """The sizes of these budgets; wider models would be built, to count their parameters."""
    monkeypatch.setattr(scaling, "WIDTHS", [width for width in scaling.WIDTHS if width <= 384])


def grid_of(data_dir, budgets, loss, **options):
    settings = TrainConfig(data_dir=str(data_dir), n_positions=32).settings()
    changes = {"data_dir": str(data_dir), "n_positions": 32}
    base = Trial(ROOT / "recipes/quickstart.py", "base", changes, settings)
    queue = Formula(Path("runs/scaling_laws"), [""])
    queue.loss = loss
    options = {"max_epochs": 1e9} | options
    return Grid(base, queue, budgets, **options)


def test_the_sizes_of_a_budget_have_equal_flops(data_dir):
    grid = grid_of(data_dir, [1e14], lambda N, D, _: loss_of(LAW, N, D), sizes=5)
    assert grid.train() is None
    assert len(grid.runs) == 5
    sizes = [one.shape.parameter_count for one in grid.runs]
    assert all(1.2 < b / a < 3.2 for a, b in itertools.pairwise(sizes))
    ratios = [one.tokens / one.shape.parameter_count for one in grid.runs]
    assert ratios[1] > 20 > ratios[3]
    for one in grid.runs:  # up to half an update
        batch = one.config.total_batch_size * one.flops_per_token
        assert abs(one.flops - 1e14) <= batch / 2
    larger = grid_of(data_dir, [1e14], None, sizes=9)
    assert {one.id for one in grid.runs} < {one.id for one in larger.runs}


@pytest.mark.parametrize("power", [-1, 1])
def test_a_minimum_at_the_edge_is_named(power, data_dir):
    grid = grid_of(data_dir, [1e11], lambda N, D, _: N**power)
    law = grid.train()
    text = grid.text(law, None)
    assert law is None
    assert "at least 8 finished runs" in text
    assert "smallest or largest size" in text
    middle = grid_of(data_dir, [1e11], lambda N, D, _: abs(N - grid.runs[3].shape.parameter_count))
    assert "smallest or largest size" not in middle.text(middle.train(), None)


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_a_law_whose_form_does_not_hold_is_not_to_be_extrapolated(shift, data_dir):
    random = np.random.default_rng(0)

    def loss(N, D, flops):
        return loss_of(LAW, N, D) + shift * (5e11 < flops < 5e12) + random.normal(0, 0.005)

    grid = grid_of(data_dir, (1e11, 1e12, 1e13), loss)
    law = grid.train()
    text = grid.text(law, 1e14)
    assert (law.form < 0.05) == bool(shift)
    assert ("95% interval " in text.partition("the best run")[2]) == (not shift)
    # The printed command trains the run that the prediction is for.
    words = shlex.split(re.search("train it: gpt2-accel quickstart (.*)", text)[1])
    config = parse_config(TrainConfig, words)
    best = grid.best(law, 1e14)
    assert f"{best.shape.parameter_count:,} parameters" in estimate_run(config)
    expected = best.config.settings()
    for name in ("eval_every", "output_dir", "resume_from"):  # a study sets them
        expected[name] = config.settings()[name]
    assert config.settings() == expected


def test_repeated_data_is_refused_unless_asked_for(data_dir):
    with refused("prepare more text"):
        grid_of(data_dir, [1e12], None, max_epochs=4)
    grid = grid_of(data_dir, [1e12], None)
    limit = max(map(grid.epochs, grid.runs))
    assert grid_of(data_dir, [1e12], None, max_epochs=limit).runs == grid.runs


@long
def test_the_recipe_writes_its_table_its_law_and_the_best_run(data_dir, tmp_path):
    options = ["--n_positions", "32", "--max_epochs", "99", "--sizes", "5", "--eval_tokens", "1024"]
    options += ["--data_dir", data_dir, "--budgets", "1e10", "2e10", "--target_flops", "1e11"]
    planned = python(RECIPE, *options, "--dry_run", "true")
    assert planned.stdout.count("missing ") == 10, planned.stderr
    done = python(RECIPE, *options, "--output_dir", tmp_path)
    assert (tmp_path / "scaling.md").read_text().strip() in done.stdout
    assert (tmp_path / "scaling.png").exists()
    assert (tmp_path / "runs.csv").exists()
    record = read_json(tmp_path / "law.json")
    assert list(record["law"]) == ["E", "A", "alpha", "B", "beta"]
    assert record["settings"]["n_positions"] == 32
