"""Scaling laws: the grid's growth on a law that is a formula, the outcome, and the recipe."""

import itertools
import re
from dataclasses import asdict

import numpy as np
import pytest
from launching import ROOT, in_process

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.estimate.law import follow_law, loss_of, read_law
from gpt2_accel.files import write_json
from gpt2_accel.study.outcome import scaling_page
from gpt2_accel.study.scaling import SIDE, Grid, Scaling, fit_runs, lowest
from gpt2_accel.study.trials import Result, Trial

RECIPE = ROOT / "recipes/scaling_laws.py"


def grid_of(data_dir, budgets, max_epochs=1e9):
    settings = TrainConfig(data_dir=str(data_dir), n_positions=32).settings()
    return Grid(Trial(RECIPE, {}, settings), budgets, max_epochs=max_epochs)


class Formula:
    """Stands for an engine whose losses are a formula of N and D."""

    def __init__(self):
        self.results = {}

    def knows(self, trial):
        return trial.id in self.results


def grow(grid, budget, loss):
    """Returns the runs of a budget with losses by a formula of N and D."""
    engine = Formula()
    while not all(engine.knows(one.trial) for one in grid.runs(budget, engine)):
        for one in grid.runs(budget, engine):
            found = loss(one.N, one.tokens)
            engine.results[one.trial.id] = Result("", "", 1, 1, 1, 1.0, found)
    return grid.runs(budget, engine)


def said(outcome, target):
    return "\n".join(scaling_page(outcome, target).text)


@pytest.mark.parametrize("A, B", [(40, 60), (400, 20), (20, 80)])
def test_a_budget_grows_until_two_sizes_lie_on_each_side(data_dir, A, B):
    grid, law = grid_of(data_dir, [1e14]), (1.0, A, 0.3, B, 0.3)
    runs = grow(grid, 1e14, lambda N, D: loss_of(law, N, D))
    place, last = lowest(runs), len(runs) - 1
    assert min(place, last - place) == SIDE or (len(runs) == 2 * SIDE + 1 and place == SIDE)
    assert "its minimum is not certain" not in said(Scaling(grid, runs), None)
    assert all(1.2 < b.N / a.N < 3.2 for a, b in itertools.pairwise(runs))
    for one in runs:  # equal FLOPs, up to half an update
        flops = one.tokens * one.trial.flops_per_token
        batch = one.trial.config.total_batch_size * one.trial.flops_per_token
        assert abs(flops - 1e14) <= batch / 2


def test_a_minimum_at_the_edge_is_said(data_dir):
    grid = grid_of(data_dir, [1e11])
    runs = grow(grid, 1e11, lambda N, D: float(N))  # the smaller the better, down to a width of 16
    assert runs[0].trial.config.n_embd == 16 and fit_runs(grid, runs) is None
    text = said(Scaling(grid, runs), None)
    assert "no law: a fit needs at least 8 finished runs" in text and "fewer than 2 sizes" in text


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_a_law_whose_form_does_not_hold_is_not_to_be_extrapolated(shift, data_dir, tmp_path):
    grid, law = grid_of(data_dir, (1e11, 1e12, 1e13)), (1.0, 40.0, 0.3, 60.0, 0.3)
    random, runs = np.random.default_rng(0), []
    for budget in grid.budgets:
        wrong = shift * (budget == 1e12)
        runs += grow(
            grid, budget, lambda N, D, w=wrong: loss_of(law, N, D) + w + random.normal(0, 0.005)
        )
    outcome = Scaling(grid, runs, fit_runs(grid, runs))
    page = scaling_page(outcome, 1e14)
    said = "\n".join(page.text)
    for text in (said, page.document()):
        assert ("do not extrapolate this law" in text) == bool(shift)
        assert ("no test refuses the form of the law" in text) == (not shift)
    assert ("95% interval " in said.partition("the best run")[2]) == (not shift)
    assert ("| alpha | " in said) and ("| none" in said) == bool(shift)
    # A run with the printed settings follows the law, and has the prediction.
    write_json(path := tmp_path / "law.json", asdict(outcome.law))
    predicted, words = re.search(r"the data: (val.*)\. Train it with --law and (.*)", said).groups()
    words += f" --law {path} --data_dir {data_dir} --n_positions 32"
    config = follow_law(parse_config(TrainConfig, words.split()))
    assert predicted in dry_run(config) and config.optimizer == "muon"


def test_repeated_data_is_refused_unless_asked_for(data_dir):
    with pytest.raises(ValueError, match="reads the data .* times, and .* prepare more text"):
        grow(grid_of(data_dir, [1e12], max_epochs=4), 1e12, lambda N, D: 1.0)
    grid = grid_of(data_dir, [1e12])
    limit = grid.epochs(grow(grid, 1e12, lambda N, D: 1.0)[0])
    bounded = grid_of(data_dir, [1e12], limit)
    runs = grow(bounded, 1e12, lambda N, D: float(N))  # does not grow beyond what is allowed
    assert max(map(bounded.epochs, runs)) == limit


def test_the_recipe_writes_its_table_its_law_and_the_best_run(data_dir, tmp_path):
    options = f"--data_dir {data_dir} --n_positions 32 --max_epochs 99 --eval_tokens 1024".split()
    both = (*options, "--budgets", "1e10", "2e10", "--target_flops", "1e11")
    planned = in_process(RECIPE, *both, "--dry_run", "true")
    assert planned.stdout.count("missing ") == 10, planned.stderr
    done = in_process(RECIPE, *both, "--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "scaling.html").read_text() and (tmp_path / "runs.csv").exists()
    words = ("1e11 FLOPs has", "no best size, since a term is 0")  # runs this short may not tell
    assert read_law(tmp_path / "law.json").flops > 1e10
    assert any(text in done.stdout for text in words)
