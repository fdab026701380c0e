"""Scaling laws: the fit, its intervals and its test of the form on simulated runs, and `--law`."""

import json
import math
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
from conftest import run

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.estimate.law import (
    LEARNING_RATE,
    FittedLaw,
    batch_for,
    follow_law,
    loss_of,
    read_law,
    settings_for,
)
from gpt2_accel.files import write_json
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.study.law_fit import bootstrap, fit_law, form_test

BESIROGLU = np.array([1.8172, 482.01, 0.3478, 2085.43, 0.3658])  # arXiv:2404.10102
STUDIES = int(os.environ.get("COVERAGE_STUDIES", "30"))  # simulated
LAW = FittedLaw([*BESIROGLU], [], 0.02, {"budget": 0.5}, "gpt2", 32, "", 1e10, LEARNING_RATE)


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
    found, spread = fit_law(N, D, loss_of(BESIROGLU, N, D))
    assert found == pytest.approx(BESIROGLU, rel=1e-6) and spread < 1e-8
    found, _ = fit_law(N, D, 2 + 300 * N**-0.3)
    assert found[[0, 1, 2]] == pytest.approx([2, 300, 0.3], rel=1e-4) and found[3] < 1e-6
    found, _ = fit_law(N, D, 2 - 300 * N**-0.3)  # rises with N
    assert (found >= 0).all()


def test_intervals_cover_the_truth_if_the_form_is_right():
    """Simulated grids of 21 runs with noise: the five numbers, and a new run of ten times the largest budget.
    `COVERAGE_STUDIES=400` takes 15 minutes on one core, and covered 97.5, 94.3, 94.3, 97, 97.5 and 97%."""
    N, D, _ = isoflop([1e18, 3e18, 1e19])
    random, hits = np.random.default_rng(1), []
    [size], [tokens], _ = isoflop([1e20], count=1)
    for _ in range(STUDIES):
        losses = loss_of(BESIROGLU, N, D) + random.normal(0, 0.005, len(N))
        samples = bootstrap(N, D, *fit_law(N, D, losses), 100 if STUDIES < 100 else 400)
        low, high = np.quantile(samples[:, :5], (0.025, 0.975), axis=0)
        predicted = replace(LAW, samples=samples.tolist()).predict(size, tokens, 1e20)
        new = loss_of(BESIROGLU, size, tokens) + random.normal(0, 0.005)
        covered = predicted.low <= new <= predicted.high
        hits.append([*((low <= BESIROGLU) & (high >= BESIROGLU)), covered])
    shares = np.mean(hits, 0)
    print("covered, E, A, alpha, B, beta, a new run:", shares)
    assert (shares >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / STUDIES)).all() and shares.min() < 1


def test_the_form_is_refused_when_it_is_wrong_and_seldom_when_it_is_right():
    N, D, budgets = isoflop([1e18, 3e18, 1e19])
    truth, random = loss_of(BESIROGLU, N, D), np.random.default_rng(0)

    def p(shift):
        losses = truth + random.normal(0, 0.005, len(N)) + shift * (budgets == 3e18)
        law, _ = fit_law(N, D, losses, [BESIROGLU[[2, 4]]])
        return form_test(N, D, losses, law, budgets)

    assert 0.02 < np.mean([p(0.0) < 0.05 for _ in range(200)]) < 0.08
    assert max(p(0.03) for _ in range(20)) < 0.01
    assert form_test(N, D, truth, BESIROGLU, N) is None  # each size has one run


def test_the_best_tokens_of_a_size_are_those_at_which_it_is_the_best():
    N, D, _ = isoflop([1e19], count=1)
    assert LAW.tokens(N[0]) == pytest.approx(D[0], rel=1e-9)


def test_the_rules_of_settings():
    assert batch_for(2e6, 128) == 2048 and batch_for(10, 128) == 128
    base = settings_for(64, 2e6, 2048, LEARNING_RATE)
    assert (base["max_steps"], base["learning_rate"]) == (977, LEARNING_RATE)
    assert (base["weight_decay"], base["warmup_steps"], base["optimizer"]) == (0.3, 10, "muon")
    tokens = 2e6 * 4 ** (1 / 0.383)
    assert batch_for(tokens, 128) == 8192
    # Twice by the batch, a root of two less by the width.
    rate = settings_for(128, tokens, 8192, LEARNING_RATE)["learning_rate"]
    assert rate == pytest.approx(2**0.5 * LEARNING_RATE, rel=1e-3)


@pytest.fixture
def law_file(data_dir, tmp_path):
    """Returns a function that writes a law of the data, whose draws differ from it by up to 1%: its path and the law."""

    def write(law=(1.0, 40.0, 0.3, 3.0, 0.3), **changes):
        draws = [
            [v * (1 + 0.01 * math.sin(7 * k + i)) for i, v in enumerate(law)] for k in range(50)
        ]
        own = {"law": [*law], "samples": [[*draw, 0.02] for draw in draws]}
        own["tokenizer"] = read_manifest(data_dir)["tokenizer"]["fingerprint"]
        found = replace(LAW, **own | changes)
        write_json(tmp_path / "law.json", asdict(found))
        return tmp_path / "law.json", found

    return write


def test_a_run_follows_a_law_and_says_its_prediction(tiny, data_dir, tmp_path, law_file, capsys):
    path, law = law_file()
    assert read_law(path) == law
    common = f"--data_dir {data_dir} --law {path} --n_positions 32".split()
    followed = follow_law(parse_config(TrainConfig, common))
    tokens = law.tokens(GPTConfig(257, 32).parameter_count)
    ruled = settings_for(768, tokens, batch_for(tokens, 32), LEARNING_RATE)
    assert {name: getattr(followed, name) for name in ruled} == ruled
    given = follow_law(parse_config(TrainConfig, [*common, "--beta2", "0.95", "--depth", "12"]))
    assert given.beta2 == 0.95 and given.optimizer == "muon"  # 0.95 is the default, and was given
    own = follow_law(parse_config(TrainConfig, [*common, "--max_steps", "2000"]))
    assert own.total_batch_size == followed.total_batch_size
    assert own.weight_decay < followed.weight_decay
    batch = follow_law(parse_config(TrainConfig, [*common, "--total_batch_size", "320"]))
    assert batch.max_steps == round(tokens / 320) and batch.warmup_steps == round(tokens / 32000)
    changes = {"depth": 1, "max_steps": 4, "eval_every": 4}
    config = tiny("run", law=str(path), **changes)
    lines = run(config)
    assert lines[-1]["tokens"] == 4 * 128  # other than the default, so given
    shape = GPTConfig(257, 32, 1, 1, 64)
    metadata = json.loads((tmp_path / "run/run.json").read_text())
    flops = 4 * 128 * float(metadata["flops_per_token"])
    predicted = law.predict(shape.parameter_count, 4 * 128, flops)
    assert predicted.low < predicted.loss < predicted.high
    assert metadata["prediction"] == asdict(predicted)
    printed = capsys.readouterr().out
    assert f"the law predicts {predicted}" in printed
    assert str(predicted) in dry_run(follow_law(config))


def test_a_begun_run_keeps_its_settings_when_its_law_changes(data_dir, tmp_path, law_file):
    path, _ = law_file()
    options = f"--data_dir {data_dir} --law {path} --n_positions 32 --resume_from latest".split()
    options += ["--output_dir", str(tmp_path / "run")]
    begun = follow_law(parse_config(TrainConfig, options))
    (tmp_path / "run").mkdir()
    begun.save(tmp_path / "run/config.yaml")
    law_file((1.0, 40.0, 0.3, 2.8, 0.3))
    assert follow_law(parse_config(TrainConfig, options)) == begun
    fresh = follow_law(parse_config(TrainConfig, [*options[:-2]]))
    assert fresh.max_steps < begun.max_steps


def test_a_law_of_something_else_is_refused(tiny, tmp_path, law_file):
    path = tmp_path / "law.json"
    config = tiny("run", law=str(path), max_steps=TrainConfig.max_steps)
    with pytest.raises(FileNotFoundError, match="law.json: there is no such file"):
        follow_law(config)
    path.write_text("{}")
    with pytest.raises(ValueError, match="law.json is no law of this release"):
        follow_law(config)
    other = "tokens of the tokenizer .*, not for gpt2 with sequences of 32 tokens .*: give the same"
    for changes, message in (
        ({"tokenizer": "other"}, other),
        ({"architecture": "llama"}, f"is for llama with .* {other}"),
        ({"n_positions": 64}, f"of 64 {other}"),
        ({"law": (1.0, 0.0, 0.3, 60.0, 0.3)}, "no best size, since a term is 0"),
        ({"law": (1.0, 4.0, 0.3, 60.0, 0.1)}, "asks for .* tokens, .* times .*, and knows no"),
    ):
        law_file(**changes)
        with pytest.raises(ValueError, match=message):
            follow_law(config)
    with pytest.raises(ValueError, match="--law is for a new model"):
        follow_law(replace(config, init_from="mine"))
