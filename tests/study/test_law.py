"""Scaling laws: the fit, its intervals and its test of the form on simulated runs, and `--law`."""

import json
import math
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
from conftest import run, tiny_config

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.estimate.law import (
    FittedLaw,
    Rules,
    ScalingLaw,
    family,
    follow_law,
    read_law,
    sizes,
)
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.study.law_fit import bootstrap, fit, fit_law, form_test

BESIROGLU = np.array([1.8172, 482.01, 0.3478, 2085.43, 0.3658])  # arXiv:2404.10102
STUDIES = int(os.environ.get("COVERAGE_STUDIES", "30"))  # simulated

LAW = FittedLaw(
    law=[*BESIROGLU],
    samples=[],
    spread=0.02,
    form={"budget": 0.5},
    architecture="gpt2",
    vocab_size=257,
    n_positions=32,
    tokenizer="",
    data="",
    flops=1e10,
    rules=asdict(Rules()),
)


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


def test_intervals_cover_the_truth_if_the_form_is_right():
    """Simulated grids of 21 runs with noise: the five numbers, and a new run of ten times the largest budget.
    `COVERAGE_STUDIES=400` takes 15 minutes on one core, and covered 97.5, 94.3, 94.3, 97, 97.5 and 97%."""
    N, D, _ = isoflop([1e18, 3e18, 1e19])
    truth, random, hits = ScalingLaw(*BESIROGLU), np.random.default_rng(1), []
    [size], [tokens], _ = isoflop([1e20], count=1)
    for _ in range(STUDIES):
        losses = truth.loss(N, D) + random.normal(0, 0.005, len(N))
        samples = bootstrap(N, D, *fit_law(N, D, losses), 100 if STUDIES < 100 else 400)
        low, high = np.quantile(samples[:, :5], (0.025, 0.975), axis=0)
        least, most = replace(LAW, samples=samples.tolist()).interval(size, tokens)
        new = truth.loss(size, tokens) + random.normal(0, 0.005)
        hits.append([*((low <= BESIROGLU) & (high >= BESIROGLU)), least <= new <= most])
    shares = np.mean(hits, 0)
    print("covered, E, A, alpha, B, beta, a new run:", shares)
    assert (shares >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / STUDIES)).all() and shares.min() < 1


def test_the_form_is_refused_when_it_is_wrong_and_seldom_when_it_is_right():
    N, D, budgets = isoflop([1e18, 3e18, 1e19])
    truth, random = ScalingLaw(*BESIROGLU).loss(N, D), np.random.default_rng(0)

    def p(shift):
        losses = truth + random.normal(0, 0.005, len(N)) + shift * (budgets == 3e18)
        law, _ = fit_law(N, D, losses, [BESIROGLU[[2, 4]]])
        return form_test(N, D, losses, law, budgets)

    assert 0.02 < np.mean([p(0.0) < 0.05 for _ in range(200)]) < 0.08
    assert max(p(0.03) for _ in range(20)) < 0.01
    assert form_test(N, D, truth, BESIROGLU, N) is None  # each size has one run


def test_a_refused_law_has_no_interval(data_dir):
    N, D, budgets = isoflop([1e18, 3e18, 1e19])
    losses = ScalingLaw(*BESIROGLU).loss(N, D) + np.random.default_rng(0).normal(0, 0.005, len(N))
    shape = GPTConfig(257, 32)
    law = law_of(data_dir, **fit(N, D, losses, budgets))
    predicted = law.predict(shape, 1e6)
    assert law.holds and predicted.low < predicted.loss < predicted.high
    law = law_of(data_dir, **fit(N, D, losses + 0.03 * (budgets == 3e18), budgets))
    predicted = law.predict(shape, 1e6)
    assert not law.holds and predicted.low is predicted.high is None
    assert "without an interval, since the law does not fit its own runs" in str(predicted)


def law_of(data_dir, law=(1.0, 40.0, 0.3, 60.0, 0.3), **changes):
    """Returns a fitted law of the data with these parameters, whose draws differ from it by up to 1%."""
    draws = [[v * (1 + 0.01 * math.sin(7 * k + i)) for i, v in enumerate(law)] for k in range(50)]
    tokenizer = read_manifest(data_dir)["tokenizer"]
    own = {"vocab_size": tokenizer["vocab_size"], "tokenizer": tokenizer["fingerprint"], "law": law}
    own["samples"] = [[*draw, 0.02] for draw in draws]
    return replace(LAW, **own | changes)


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
def test_the_best_tokens_of_a_size_are_those_at_which_it_is_the_best(architecture):
    law, known = ScalingLaw(*BESIROGLU), family(architecture, 1024, 128)
    place = 20
    tokens = law.tokens(known.N[place], known)
    assert abs(law.best(tokens * known.flops[place], known) - place) <= 1


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


def test_a_law_of_something_else_is_refused(data_dir, tmp_path):
    path = tmp_path / "law.json"
    config = tiny_config(data_dir, tmp_path / "run", law=str(path), max_steps=TrainConfig.max_steps)
    with pytest.raises(FileNotFoundError, match="law.json: there is no such file"):
        follow_law(config)
    good = asdict(law_of(data_dir))
    broken = [{"samples": []}, {"samples": [good["law"]]}, {"embeddings": True}]
    contents = ["{", "{}", '{"law": 1}', "[]", *(json.dumps(good | change) for change in broken)]
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
