"""Scaling laws: the grid and its outcome on a law that is a formula, and the recipe."""

import itertools
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import long, read_json, refused
from launching import ROOT, in_process

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.tools.study.engine import Engine
from gpt2_accel.tools.study.law import loss_of
from gpt2_accel.tools.study.scaling import Grid
from gpt2_accel.tools.study.trials import Result, Trial

RECIPE = ROOT / "recipes/scaling_laws.py"
LAW = (1.0, 40.0, 0.3, 60.0, 0.3)


class Formula(Engine):
    """An engine whose losses are a formula of N, D and the FLOPs."""

    def run(self, trials):
        for one in trials:
            found = self.loss(float(one.shape.parameter_count), one.tokens, one.flops)
            self.results[one.id] = Result("", "", 1, 1, 1, 1.0, found)


def grid_of(data_dir, budgets, loss, **options):
    settings = TrainConfig(data_dir=str(data_dir), n_positions=32).settings()
    changes = {"data_dir": str(data_dir), "n_positions": 32}
    base = Trial(ROOT / "recipes/quickstart.py", changes, settings)
    engine = Formula(Path("runs/scaling_laws"), [""])
    engine.loss = loss
    return Grid(base, engine, budgets, **{"max_epochs": 1e9, **options})


def test_the_sizes_of_a_budget_have_equal_flops(data_dir):
    grid = grid_of(data_dir, [1e14], lambda N, D, _: loss_of(LAW, N, D), sizes=5)
    assert grid.train() is None and len(grid.runs) == 5
    sizes = [one.shape.parameter_count for one in grid.runs]
    assert all(1.2 < b / a < 3.2 for a, b in itertools.pairwise(sizes))
    ratios = [one.tokens / one.shape.parameter_count for one in grid.runs]
    assert ratios[1] > 20 > ratios[3]
    for one in grid.runs:  # up to half an update
        batch = one.config.total_batch_size * one.flops_per_token
        assert abs(one.flops - 1e14) <= batch / 2
    more = grid_of(data_dir, [1e14], None, sizes=9)
    assert {one.id for one in grid.runs} < {one.id for one in more.runs}


@pytest.mark.parametrize("power", [-1, 1])
def test_a_minimum_at_the_edge_is_said(power, data_dir):
    grid = grid_of(data_dir, [1e11], lambda N, D, _: N**power)
    law = grid.train()
    assert grid.runs[0].config.n_embd == 16 and law is None
    text = grid.text(law, None)
    assert "no law: a fit needs at least 8 finished runs" in text
    assert "the lowest loss is at the end of the sizes" in text
    middle = grid_of(data_dir, [1e11], lambda N, D, _: abs(N - grid.runs[3].shape.parameter_count))
    assert "at the end of the sizes" not in middle.text(middle.train(), None)


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_a_law_whose_form_does_not_hold_is_not_to_be_extrapolated(shift, data_dir):
    random = np.random.default_rng(0)

    def loss(N, D, flops):
        return loss_of(LAW, N, D) + shift * (5e11 < flops < 5e12) + random.normal(0, 0.005)

    grid = grid_of(data_dir, (1e11, 1e12, 1e13), loss)
    law = grid.train()
    text = grid.text(law, 1e14)
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
        grid_of(data_dir, [1e12], None, max_epochs=4)
    grid = grid_of(data_dir, [1e12], None)
    limit = max(map(grid.epochs, grid.runs))
    assert grid_of(data_dir, [1e12], None, max_epochs=limit).runs == grid.runs


@long
def test_the_recipe_writes_its_table_its_law_and_the_best_run(data_dir, tmp_path):
    options = f"--data_dir {data_dir} --n_positions 32 --max_epochs 99 --sizes 5 --eval_tokens 1024".split()
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
