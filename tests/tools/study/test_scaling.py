"""Scaling laws: the grid's growth on a law that is a formula, the outcome, and the recipe."""

import itertools
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import read_json, refused
from launching import ROOT, in_process

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.tools.study.law import loss_of
from gpt2_accel.tools.study.outcome import scaling_text
from gpt2_accel.tools.study.scaling import SIDE, Grid
from gpt2_accel.tools.study.trials import Result, Trial

RECIPE = ROOT / "recipes/scaling_laws.py"
LAW = (1.0, 40.0, 0.3, 60.0, 0.3)


class Formula:
    """Stands for an engine whose losses are a formula of N, D and the FLOPs."""

    folder = Path("runs/scaling_laws")

    def __init__(self, loss):
        self.results, self.loss = {}, loss

    def knows(self, trial):
        return trial.id in self.results

    def run(self, trials):
        for one in trials:
            found = self.loss(float(one.shape.parameter_count), one.tokens, one.flops)
            self.results[one.id] = Result("", "", 1, 1, 1, 1.0, found)


def grid_of(data_dir, budgets, loss, max_epochs=1e9):
    settings = TrainConfig(data_dir=str(data_dir), n_positions=32).settings()
    changes = {"data_dir": str(data_dir), "n_positions": 32, "eval_every": 10**9}
    base = Trial(ROOT / "recipes/quickstart.py", changes, settings)
    return Grid(base, Formula(loss), budgets, max_epochs=max_epochs)


def said(grid, law, target=None):
    return scaling_text(grid, law, target)


@pytest.mark.parametrize("A, B", [(40, 60), (400, 20), (20, 80)])
def test_a_budget_grows_until_two_sizes_lie_on_each_side(data_dir, A, B):
    grid = grid_of(data_dir, [1e14], lambda N, D, _: loss_of((1.0, A, 0.3, B, 0.3), N, D))
    assert grid.train() is None
    [runs] = grid.runs.values()
    place, last = grid.lowest(runs), len(runs) - 1
    assert min(place, last - place) == SIDE or (len(runs) == 2 * SIDE + 1 and place == SIDE)
    assert "its minimum is not certain" not in said(grid, None)
    sizes = [one.shape.parameter_count for one in runs]
    assert all(1.2 < b / a < 3.2 for a, b in itertools.pairwise(sizes))
    for one in runs:  # equal FLOPs, up to half an update
        batch = one.config.total_batch_size * one.flops_per_token
        assert abs(one.flops - 1e14) <= batch / 2


def test_a_minimum_at_the_edge_is_said(data_dir):
    grid = grid_of(data_dir, [1e11], lambda N, D, _: N)  # the smaller the better
    law = grid.train()
    assert grid.runs[1e11][0].config.n_embd == 16 and law is None
    text = said(grid, law)
    assert "no law: a fit needs at least 8 finished runs" in text and "fewer than 2 sizes" in text


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_a_law_whose_form_does_not_hold_is_not_to_be_extrapolated(shift, data_dir):
    random = np.random.default_rng(0)

    def loss(N, D, flops):
        return loss_of(LAW, N, D) + shift * (5e11 < flops < 5e12) + random.normal(0, 0.005)

    grid = grid_of(data_dir, (1e11, 1e12, 1e13), loss)
    law = grid.train()
    text = said(grid, law, 1e14)
    assert ("do not extrapolate this law" in text) == bool(shift)
    assert ("no test refuses the form of the law" in text) == (not shift)
    assert ("95% interval " in text.partition("the best run")[2]) == (not shift)
    assert ("| alpha | " in text) and ("| none" in text) == bool(shift)
    # The printed command trains the run that the prediction is for.
    words = shlex.split(re.search("train it: gpt2-accel quickstart (.*)", text)[1])
    config, best = parse_config(TrainConfig, words), grid.best(law, 1e14)
    assert f"{best.shape.parameter_count:,} parameters" in dry_run(config)
    differ = {"eval_every", "output_dir", "resume_from"}
    assert {k: v for k, v in config.settings().items() if k not in differ} == {
        k: v for k, v in best.config.settings().items() if k not in differ
    }
    assert config.eval_every == TrainConfig.eval_every and config.optimizer == "muon"


def test_repeated_data_is_refused_unless_asked_for(data_dir):
    with refused("reads the data .* times, and .* prepare more text"):
        grid_of(data_dir, [1e12], lambda N, D, _: 1.0, max_epochs=4).train()
    grid = grid_of(data_dir, [1e12], lambda N, D, _: 1.0)
    grid.train()
    limit = grid.epochs(grid.runs[1e12][0])
    bounded = grid_of(data_dir, [1e12], lambda N, D, _: N, limit)
    bounded.train()  # does not grow beyond what is allowed
    assert max(map(bounded.epochs, bounded.runs[1e12])) == limit


def test_the_recipe_writes_its_table_its_law_and_the_best_run(data_dir, tmp_path):
    options = f"--data_dir {data_dir} --n_positions 32 --max_epochs 99 --eval_tokens 1024".split()
    both = (*options, "--budgets", "1e10", "2e10", "--target_flops", "1e11")
    planned = in_process(RECIPE, *both, "--dry_run", "true")
    assert planned.stdout.count("missing ") == 10, planned.stderr
    done = in_process(RECIPE, *both, "--output_dir", tmp_path)
    assert (tmp_path / "scaling.md").read_text().strip() in done.stdout
    assert (tmp_path / "scaling.png").exists() and (tmp_path / "runs.csv").exists()
    words = ("1e11 FLOPs has", "no best size, since a term is 0")  # runs this short may not tell
    record = read_json(tmp_path / "law.json")
    assert len(record["law"]) == 5 and record["settings"]["n_positions"] == 32
    assert any(text in done.stdout for text in words)
