"""Scaling laws: the fit on simulated runs, the grid's growth on a law that is a formula, the recipe, and `--law`."""

import itertools
import json
import math
import signal
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import yaml
from conftest import run, tiny_config
from launching import ROOT, Started, python
from scipy.optimize import minimize, nnls

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.estimate.law import (
    FittedLaw,
    Rules,
    ScalingLaw,
    family,
    follow_law,
    parameters,
    read_law,
    shape_of,
    sizes,
)
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.study.law_fit import STARTS, bootstrap, fit_law
from gpt2_accel.study.scaling import SIDE, Grid, Scaling, fit_runs
from gpt2_accel.study.scaling_outcome import as_text
from gpt2_accel.study.trials import Result, Trial

RECIPE = ROOT / "recipes/scaling_laws.py"
BESIROGLU = np.array([1.8172, 482.01, 0.3478, 2085.43, 0.3658])  # arXiv:2404.10102


def isoflop(budgets, count=7, ratio=1.6):
    """Returns N, D and the budget of sizes around the best one of Besiroglu et al.'s law, with 6ND FLOPs."""
    _, A, alpha, B, beta = BESIROGLU
    scale = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    points = [
        (scale * (C / 6) ** (beta / (alpha + beta)) * ratio ** (i - (count - 1) / 2), C)
        for C in budgets
        for i in range(count)
    ]
    N, C = np.array(points).T
    return N, C / 6 / N, C


def test_a_law_is_found_exactly_and_never_has_a_negative_term():
    N, D, _ = isoflop([1e18, 1e19])
    found, spread = fit_law(N, D, ScalingLaw(*BESIROGLU).loss(N, D))
    assert found == pytest.approx(BESIROGLU, rel=1e-6) and spread < 1e-8
    found, _ = fit_law(N, D, 2 + 300 * N**-0.3)
    assert found[[0, 1, 2]] == pytest.approx([2, 300, 0.3], rel=1e-4) and found[3] < 1e-6
    found, _ = fit_law(N, D, 2 - 300 * N**-0.3)  # rises with N
    assert (found >= 0).all()


def test_intervals_cover_the_true_law_in_95_of_100_simulations():
    """200 grids of 21 runs with noise. With a true share of 95%, fewer than 90% covered has a probability of 0.2%."""
    N, D, budgets = isoflop([1e18, 3e18, 1e19])
    truth, random, hits = ScalingLaw(*BESIROGLU).loss(N, D), np.random.default_rng(0), []
    for _ in range(200):
        losses = truth + random.normal(0, 0.005, len(N))
        samples = bootstrap(N, D, losses, budgets, fit_law(N, D, losses)[0])
        low, high = np.quantile(samples, (0.025, 0.975), axis=0)
        hits.append((low <= BESIROGLU) & (high >= BESIROGLU))
    shares = np.mean(hits, 0)
    print(f"covered: {dict(zip(('E', 'A', 'alpha', 'B', 'beta'), shares.tolist(), strict=True))}")
    assert (shares >= 0.9).all() and (shares < 1).any()


def law_of(data_dir, law=(1.0, 40.0, 0.3, 60.0, 0.3), **changes):
    """Returns a fitted law of the data with these parameters, whose samples differ from it by up to 1%."""
    samples = [[v * (1 + 0.01 * math.sin(7 * k + i)) for i, v in enumerate(law)] for k in range(50)]
    tokenizer = read_manifest(data_dir)["tokenizer"]
    own = {"vocab_size": tokenizer["vocab_size"], "tokenizer": tokenizer["fingerprint"], "data": ""}
    own |= {"law": list(law), "samples": samples, "spread": 0.02, "rules": asdict(Rules())}
    own |= {"embeddings": True, "architecture": "gpt2", "n_positions": 32, "flops": [1e9, 1e10]}
    return FittedLaw(**{**own, "N": [1e4, 1e5], "D": [1e4, 1e5], **changes})


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
    assert outcome.edges == [1e11] and fit_runs(outcome) == (None, {})
    text = as_text(outcome, None)
    assert "no law: a fit needs at least 8 finished runs" in text and "fewer than 2 smaller" in text


@pytest.mark.parametrize("shift", [0.0, -0.2])
def test_what_a_law_of_smaller_budgets_misses_is_said(shift, data_dir):
    grid, law = grid_of(data_dir, (1e11, 1e12, 1e13)), ScalingLaw(1.0, 40.0, 0.3, 60.0, 0.3)
    runs = {
        budget: grow(grid, budget, lambda N, D, b=budget: law.loss(N, D) + shift * (b == 1e13))
        for budget in grid.budgets
    }
    outcome = Scaling(grid, runs, {})
    outcome.law, outcome.by_count = fit_runs(outcome)
    assert outcome.law.held_out == pytest.approx(shift, abs=1e-3)
    predicted = outcome.law.predict(runs[1e13][0].shape, 1e9)
    side = f"{abs(shift):.3f} nats {'below' if outcome.law.held_out < 0 else 'above'}"
    assert f"whose budget lies {side} what a law of the smaller" in str(predicted)
    assert f"the runs of 1e13 FLOPs lie {side} what a law of the smaller" in as_text(outcome, None)


def test_repeated_data_is_refused_unless_asked_for(data_dir):
    with pytest.raises(ValueError, match="would read the data .* times: prepare more text"):
        grow(grid_of(data_dir, max_epochs=4), 1e12, lambda N, D: 1.0)
    grid = grid_of(data_dir)
    smallest = grid.epochs(grid.run(grid.first(1e12)[0], 1e12))
    bounded = replace(grid, max_epochs=smallest)
    runs = grow(bounded, 1e12, lambda N, D: float(N))  # does not grow beyond what is allowed
    assert max(map(bounded.epochs, runs)) <= smallest and len(runs) == 5


def test_the_rules_of_sizes_and_settings():
    by_width = {size["n_embd"]: (size["n_layer"], size["n_head"]) for size in sizes()}
    assert by_width[16] == (2, 1) and by_width[256] == (4, 16) and by_width[768] == (12, 12)
    assert 272 not in by_width and 320 in by_width
    base = Rules().settings(64, 2e6, 128)
    assert (base["total_batch_size"], base["max_steps"]) == (2048, 977)
    assert base["learning_rate"] == Rules.learning_rate
    assert (base["weight_decay"], base["warmup_steps"], base["optimizer"]) == (0.3, 10, "muon")
    longer = Rules().settings(128, 2e6 * 4 ** (1 / 0.383), 128)  # four times the batch
    assert longer["total_batch_size"] == 8192
    # Twice by the batch, a root of two less by the width.
    assert longer["learning_rate"] == pytest.approx(2**0.5 * Rules.learning_rate, rel=1e-3)
    assert Rules().settings(64, 10, 128)["total_batch_size"] == 128


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
def test_the_best_tokens_of_the_best_size_are_those_of_the_law(architecture):
    law, family_ = ScalingLaw(*BESIROGLU), family(architecture, 1024, 128, True)
    N, D = law.best(1e20, family_)
    assert law.tokens(N, family_) == pytest.approx(D, rel=0.02)
    shape = shape_of(sizes()[3], architecture, 1024, 128)
    assert 0 < parameters(shape, False) < parameters(shape, True) == shape.parameter_count


def test_a_run_follows_a_law_and_says_its_prediction(data_dir, tmp_path, capsys):
    path = tmp_path / "law.json"
    law = law_of(data_dir, [1.0, 40.0, 0.3, 3.0, 0.3], data=data_fingerprint(data_dir))
    law.save(path)
    assert read_law(path) == law
    common = f"--data_dir {data_dir} --law {path} --n_positions 32".split()
    followed = follow_law(parse_config(TrainConfig, common))
    tokens = law.point.tokens(GPTConfig(257, 32).parameter_count, law.sizes)
    for name, value in Rules().settings(768, tokens, 32).items():
        assert getattr(followed, name) == value
    given = follow_law(parse_config(TrainConfig, [*common, "--beta2", "0.95", "--depth", "12"]))
    assert given.beta2 == 0.95 and given.optimizer == "muon"  # 0.95 is the default, and was given
    own = follow_law(parse_config(TrainConfig, [*common, "--max_steps", "2000"]))
    ruled = Rules().settings(768, 2000 * own.total_batch_size, 32, own.total_batch_size)
    assert own.weight_decay == ruled["weight_decay"] < followed.weight_decay
    batch = follow_law(parse_config(TrainConfig, [*common, "--total_batch_size", "320"]))
    assert batch.max_steps == round(tokens / 320) and batch.warmup_steps == round(tokens / 32000)
    changes = {"depth": 1, "max_steps": 4, "eval_every": 4}
    config = tiny_config(data_dir, tmp_path / "run", law=str(path), **changes)
    lines = run(config)
    assert lines[-1]["tokens"] == 4 * 128  # other than the default, so given
    given = ("warmup_steps", "learning_rate")  # by `tiny_config`
    predicted = replace(law.predict(GPTConfig(257, 32, 1, 1, 64), 4 * 128), other=given)
    assert predicted.low < predicted.loss < predicted.high
    metadata = json.loads((tmp_path / "run/run.json").read_text())
    assert metadata["prediction"] == asdict(predicted) | {"other": [*given]}
    assert str(predicted).endswith("; the law's runs have another warmup_steps, learning_rate")
    printed = capsys.readouterr().out
    assert f"the law predicts {predicted}" in printed
    assert f"the law predicted {predicted}" in printed and str(predicted) in dry_run(
        follow_law(config)
    )
    replace(law, data="another").save(path)
    assert f"{predicted}, text" in dry_run(follow_law(config))


def test_a_begun_run_keeps_its_settings_when_its_law_changes(data_dir, tmp_path):
    path = tmp_path / "law.json"
    options = f"--data_dir {data_dir} --law {path} --n_positions 32 --resume_from latest".split()
    options += ["--output_dir", str(tmp_path / "run")]
    law_of(data_dir, [1.0, 40.0, 0.3, 3.0, 0.3]).save(path)
    begun = follow_law(parse_config(TrainConfig, options))
    (tmp_path / "run").mkdir()
    begun.save(tmp_path / "run/config.yaml")
    law_of(data_dir, [1.0, 40.0, 0.3, 2.8, 0.3]).save(path)
    assert follow_law(parse_config(TrainConfig, options)) == begun
    fresh = follow_law(parse_config(TrainConfig, [*options[:-2]]))
    assert fresh.max_steps < begun.max_steps


def test_the_fit_finds_the_minimum_where_a_term_is_zero():
    """The squares are those of a search by SciPy, without derivatives."""
    draw = np.random.default_rng(1)
    for _ in range(5):
        C = np.repeat([1e9, 4e9, 2e10], 6)
        N = np.tile(np.geomspace(5e3, 6e4, 6), 3) * (C / 1e9) ** 0.3
        D = C / 6 / N
        losses = 40 * N**-0.3 + 60 * D**-0.3 + draw.normal(0, 0.02, 18)

        def squares(theta, N=N, D=D, losses=losses):
            a, b = np.exp(theta)
            return nnls(np.stack([np.ones(18), N**-a, D**-b], 1), losses)[1] ** 2

        best = min(
            minimize(squares, np.log(start), method="Nelder-Mead", options={"fatol": 1e-12}).fun
            for start in STARTS
        )
        _, spread = fit_law(N, D, losses)
        assert 13 * spread**2 == pytest.approx(best, rel=1e-4)


def test_a_law_of_something_else_is_refused(data_dir, tmp_path):
    path = tmp_path / "law.json"
    config = tiny_config(data_dir, tmp_path / "run", law=str(path), max_steps=TrainConfig.max_steps)
    with pytest.raises(FileNotFoundError, match="law.json: there is no such file"):
        follow_law(config)
    good = asdict(law_of(data_dir))
    broken = [{"samples": []}, {"spread": None}, {"spread": math.nan}, {"flops": []}, {"rules": {}}]
    broken += [{"flops": [0, 0]}, {"embeddings": "no"}, {"law": [1, 40, 0, 60, 0.3]}]
    contents = ["{", "{}", '{"law": 1}', *(json.dumps(good | change) for change in broken)]
    for content in contents:
        path.write_text(content)
        with pytest.raises(ValueError, match="law.json is no law of recipes/scaling_laws.py"):
            follow_law(config)
    for changes, message in (
        ({"tokenizer": "other"}, "was fitted with another tokenizer"),
        ({"architecture": "llama"}, "is for --architecture llama, not gpt2"),
        ({"n_positions": 64}, "is for --sequence_length 64, not 32"),
        ({"law": (1.0, 0.0, 0.3, 60.0, 0.3)}, "no best size, since a term is 0"),
        (
            {"law": (1.0, 4.0, 0.3, 60.0, 0.1)},
            "asks for .* tokens, .* times .*, and knows no repet",
        ),
    ):
        law_of(data_dir, **changes).save(path)
        with pytest.raises(ValueError, match=message):
            follow_law(config)
    with pytest.raises(ValueError, match="--law is for a new model"):
        follow_law(replace(config, init_from="mine"))


def test_the_recipe_is_killed_and_goes_on_to_the_same_losses(data_dir, tmp_path):
    options = f"--data_dir {data_dir} --n_positions 32 --max_epochs 99 --eval_tokens 1024".split()
    both = (*options, "--budgets", "1e10", "2e10", "--target_flops", "1e11")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    planned = python(RECIPE, *both, "--dry_run", "true", "--device", "A100")
    assert "10 runs, 10 of them not recorded" in planned.stdout, planned.stderr
    done = python(RECIPE, *both, "--output_dir", whole)
    assert done.returncode == 0, done.stderr
    one = (*options, "--budgets", "1e10", "--output_dir", killed)
    started = Started(RECIPE, *one, log=tmp_path / "log")
    while not (killed / "runs.csv").exists() and started.poll() is None:
        time.sleep(0.1)
    started.send_signal(signal.SIGKILL)
    started.wait()
    recorded = len((killed / "runs.csv").read_text().splitlines())
    again = python(RECIPE, *one)
    assert again.returncode == 0, again.stderr
    rows = (killed / "runs.csv").read_text().splitlines()
    assert recorded < len(rows) and set(rows) < {*(whole / "runs.csv").read_text().splitlines()}
    page, best = (whole / "scaling.html").read_text(), (whole / "best.yaml").read_text()
    assert page.count('class="narrow"') == 3 and "best tokens" in done.stdout
    assert best.startswith("# 1e11 FLOPs: ") and "predicted val/loss" in best
    settings = parse_config(TrainConfig, ["--config", str(whole / "best.yaml")])
    assert follow_law(settings) == settings  # all of it was given
    assert "have another" not in dry_run(settings)
    assert yaml.safe_load(best)["n_positions"] == 32
