"""What a study says: intervals, verdicts, tuning, and what its file may hold."""

import csv
import itertools
import math
import random

import pytest
from conftest import refused
from launching import ROOT
from scipy.stats import ttest_1samp

from gpt2_accel.tools.study.compare import (
    MOST_SEEDS,
    Comparison,
    Study,
    interval,
    judge,
    plan,
    read_study,
    seed_points,
    tuning_points,
    tuning_remarks,
)


def test_the_interval_is_students():
    values = [1.0, 1.2, 0.9, 1.4]
    mean, half = interval(values)
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert interval([2.0]) == (2.0, math.inf)


def test_verdicts():
    assert judge([-0.2, -0.21, -0.19]) == "better"
    assert judge([0.2, 0.21, 0.19]) == "worse"
    assert judge([0.0, 0.0]) == "equal"
    assert judge([]) == "no pair of runs"
    assert "at least two" in judge([0.3])
    assert f"even {MOST_SEEDS:,} seeds" in judge([1.0, -1.0, 0.001])
    found = judge([0.1, -0.05, 0.06])
    more = int(found.removeprefix("not distinguishable: about ").split()[0])
    # With that many more pairs of this mean and spread the interval excludes zero, with one fewer it does not.
    mean, spread = 0.11 / 3, 0.0777
    for count, excluded in ((3 + more, True), (2 + more, False)):
        values = [random.Random(i).gauss(0, 1) for i in range(count)]
        centre = sum(values) / count
        scale = math.sqrt(sum((v - centre) ** 2 for v in values) / (count - 1))
        found = judge([mean + spread * (v - centre) / scale for v in values])
        assert found.startswith("worse" if excluded else "not distinguishable")


def test_equal_variants_are_told_apart_in_one_case_of_twenty():
    """Pairs of two groups of runs of the same settings, which differ in their seeds only."""
    with open(ROOT / "tests/tools/study/equal_runs.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == len(set(losses)) >= 60
    draw, found, count = random.Random(0), 0, 2000
    for _ in range(count):
        seeds = draw.choice((3, 5, 8))
        drawn = draw.sample(losses, 2 * seeds)
        pairs = zip(drawn[:seeds], drawn[seeds:], strict=True)
        found += judge([a - b for a, b in pairs]) in ("better", "worse")
    assert 0.03 <= found / count <= 0.07


@pytest.mark.parametrize(
    "own, base, verdict",
    [
        ([1.0, 1.1, 1.0], [2.0, 2.05, 2.0], "better"),
        ([1.0, 1.1, math.inf], [2.0, 2.05, math.inf], "better"),
        (
            [math.inf, 1.0, 1.1, 1.0],
            [math.nan, 2.0, 2.05, 2.0],
            "1 of 4 diverged, 0 of 3 of the baseline; better",
        ),
        (
            [math.inf] * 2,
            [1.0] * 2,
            "2 of 2 diverged, 0 of 2 of the baseline; no pair of runs",
        ),
    ],
)
def test_a_run_that_diverged_or_failed_is_in_no_pair(own, base, verdict):
    values = {("base", None): base, ("own", None): own}
    outcome = Comparison(Study("recipe", {"base": {}, "own": {}}), values, dict.fromkeys(values, 1))
    assert outcome.verdict("own", None)[0] == verdict
    assert outcome.verdict("base", None) == ("baseline", "")


def test_a_best_value_at_the_end_of_its_axis_is_named():
    axes = ((0.0, 0.1), (0.9, 0.99), ("linear", "wsd"))
    names = ("weight_decay", "beta2", "lr_schedule")
    tried = [dict(zip(names, point, strict=True)) for point in itertools.product(*axes)]
    best = {"weight_decay": 0.0, "beta2": 0.99, "lr_schedule": "wsd"}
    chosen, end = tuning_remarks("one", best, tried)
    assert chosen == "one: 8 trials chose weight_decay 0.0, beta2 0.99, lr_schedule wsd"
    assert end == "one: the best beta2 is at the end of its axis: extend it"  # no decay below 0


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes/studies").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_shipped_studies_have_possible_settings(path, data_dir):
    study = read_study(path, ROOT / "recipes")
    study.settings["data_dir"] = str(data_dir)
    study.seeds = 1
    tuning = tuning_points(study)
    assert len(tuning) == len(study.variants) * (5 if study.tune else 0)
    trials = plan(study, tuning + seed_points(study, {}))
    assert min(trial.config.max_steps for trial in trials) >= 73  # 75,000 tokens of 1,024
    assert len({trial.id for trial in trials}) == len(trials)


@pytest.mark.parametrize(
    "content, words",
    [
        ("recipe: quickstart\nvarints: {a: {}}", "unknown part 'varints'"),
        ("recipe: quickstart\nvariants: {a: 3}", "a is 3: give `name: value` lines"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {tokens: []}", "give numbers above 0"),
        ("recipe: quickstart\nvariants: {a: {seed: 3}}", "a sets seed, which the study sets"),
        ("recipe: quickstart\nvariants: {a: {}}\nmetric: b", "one of loss, bits_per_byte, got 'b'"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {minutes: 1}", "give tokens or flops"),
        (
            "recipe: quickstart\nvariants: {a: {beta2: 0.9}}\ntune: {beta2: [0.8, 0.9]}",
            "a sets beta2, which tune also sets",
        ),
    ],
)
def test_bad_studies_are_refused_in_a_sentence(content, words, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(content)
    with refused(words):
        read_study(path, ROOT / "recipes")


@pytest.mark.parametrize(
    "own, words",
    [
        ({"beta3": 0.9}, "a-seed1: .*unknown option --beta3: did you mean --beta"),
        ({"beta2": 1.5}, "a-seed1: .*beta2 must be at least 0 and below 1"),
        ({"eval_every": 0}, "a-seed1: eval_every is 0"),
        ({"patience": 3}, "a-seed1: patience ends a run before its budget"),
        (
            {"warmup_steps": 1, "warmup_share": 0.1},
            "a-seed1: warmup_share is 0.1: .* and no warmup_steps",
        ),
    ],
)
def test_settings_that_the_recipe_refuses_are_named_by_run(own, words, data_dir):
    study = Study(str(ROOT / "tests/train_script.py"), {"a": own}, {"data_dir": str(data_dir)})
    with refused(words):
        plan(study, seed_points(study, {}))
