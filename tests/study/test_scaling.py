"""Scaling laws: the grid's growth on a law that is a formula, the outcome, and the recipe."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import yaml
from launching import ROOT, python

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.estimate.law import Rules, ScalingLaw, follow_law
from gpt2_accel.study.scaling import SIDE, Grid, Scaling, fit_runs
from gpt2_accel.study.scaling_outcome import as_text, write_page
from gpt2_accel.study.trials import Result, Trial

RECIPE = ROOT / "recipes/scaling_laws.py"


def grid_of(data_dir, budgets=(1e11, 1e12), max_epochs=1e9):
    settings = TrainConfig(data_dir=str(data_dir), n_positions=32).settings()
    return Grid(Trial(RECIPE, {}, settings), budgets, Rules(), max_epochs)


class Formula:
    """Stands for an engine whose losses are a formula of N and D."""

    def __init__(self, loss):
        self.loss, self.results = loss, {}

    def knows(self, trial):
        return trial.id in self.results


def grow(grid, budget, loss):
    """Returns the runs of a budget with losses by a formula of N and D."""
    engine = Formula(loss)
    while not all(engine.knows(one.trial) for one in grid.runs(budget, engine)):
        for one in grid.runs(budget, engine):
            found = loss(one.parameters(), one.tokens)
            engine.results[one.trial.id] = Result("", "", 1, 1, 1, 1.0, found)
    return grid.runs(budget, engine)


@pytest.mark.parametrize("A, B", [(40, 60), (400, 20), (20, 80)])
def test_a_budget_grows_until_two_sizes_lie_on_each_side(data_dir, A, B):
    grid, law = grid_of(data_dir), ScalingLaw(1.0, A, 0.3, B, 0.3)
    runs = grow(grid, 1e14, law.loss)
    outcome = Scaling(grid, {1e14: runs}, {})
    assert not outcome.edges
    place, last = outcome.best(1e14), len(runs) - 1
    assert min(place, last - place) == SIDE or len(runs) == 2 * SIDE + 1
    counts = [one.parameters() for one in runs]
    assert all(1.2 < b / a < 3.2 for a, b in itertools.pairwise(counts))
    for one in runs:  # equal FLOPs, up to half an update
        flops = one.tokens * one.trial.flops_per_token
        batch = one.trial.config.total_batch_size * one.trial.flops_per_token
        assert abs(flops - 1e14) <= batch / 2


def test_a_minimum_at_the_edge_is_said(data_dir):
    grid = grid_of(data_dir)
    runs = grow(grid, 1e11, lambda N, D: float(N))  # the smaller the better, down to a width of 16
    assert runs[0].trial.config.n_embd == 16
    outcome = Scaling(grid, {1e11: runs}, {})
    assert outcome.edges == [1e11] and fit_runs(outcome) is None
    text = as_text(outcome, None)
    assert "no law: a fit needs at least 8 finished runs" in text and "fewer than 2 smaller" in text


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_a_law_whose_form_does_not_hold_is_not_to_be_extrapolated(shift, data_dir, tmp_path):
    grid, law = grid_of(data_dir, (1e11, 1e12, 1e13)), ScalingLaw(1.0, 40.0, 0.3, 60.0, 0.3)
    random = np.random.default_rng(0)
    runs = {
        budget: grow(
            grid,
            budget,
            lambda N, D, b=budget: law.loss(N, D) + shift * (b == 1e12) + random.normal(0, 0.005),
        )
        for budget in grid.budgets
    }
    outcome = Scaling(grid, runs, {})
    outcome.law = fit_runs(outcome)
    said = as_text(outcome, 1e14)
    page = write_page(outcome, tmp_path, 1e14).read_text()
    for text in (said, page):
        assert ("do not extrapolate this law" in text) == bool(shift)
        assert ("no test refuses the form of the law" in text) == (not shift)
    assert ("95% interval " in said.partition("the best run")[2]) == (not shift)
    assert ("| alpha | " in said) and ("| none" in said) == bool(shift)
    if shift:
        assert "by budget p < 0.001" in said and "1e12 +0." in said


def test_repeated_data_is_refused_unless_asked_for(data_dir):
    with pytest.raises(ValueError, match="would read the data .* times: prepare more text"):
        grow(grid_of(data_dir, max_epochs=4), 1e12, lambda N, D: 1.0)
    grid = grid_of(data_dir)
    smallest = grid.epochs(grid.run(grid.first(1e12)[0], 1e12))
    bounded = replace(grid, max_epochs=smallest)
    runs = grow(bounded, 1e12, lambda N, D: float(N))  # does not grow beyond what is allowed
    assert max(map(bounded.epochs, runs)) <= smallest and len(runs) == 5


def test_the_recipe_writes_its_table_its_law_and_the_best_run(data_dir, tmp_path):
    options = f"--data_dir {data_dir} --n_positions 32 --max_epochs 99 --eval_tokens 1024".split()
    both = (*options, "--budgets", "1e10", "2e10", "--target_flops", "1e11")
    whole = tmp_path / "whole"
    planned = python(RECIPE, *both, "--dry_run", "true", "--device", "A100")
    assert "10 runs, 10 of them not recorded" in planned.stdout, planned.stderr
    done = python(RECIPE, *both, "--output_dir", whole)
    assert done.returncode == 0, done.stderr
    page, best = (whole / "scaling.html").read_text(), (whole / "best.yaml").read_text()
    assert page.count('class="narrow"') == 2 and "best tokens" in done.stdout
    assert best.startswith("# 1e11 FLOPs: ") and "predicted val/loss" in best
    settings = parse_config(TrainConfig, ["--config", str(whole / "best.yaml")])
    assert follow_law(settings) == settings  # all of it was given
    assert "have another" not in dry_run(settings)
    assert yaml.safe_load(best)["n_positions"] == 32
