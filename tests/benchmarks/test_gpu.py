"""`make gpu`: its checks run on a CPU too, and its record tells mistakes from rounding."""

import inspect
import json
import math
import sys
from pkgutil import resolve_name

import pytest
from conftest import long, read_json
from launching import ROOT, python
from tables import table

sys.path.append(str(ROOT / "benchmarks"))

import gpu_checks
from cards import difference, read_cards


@long
def test_checks_run_on_a_cpu_and_a_failure_does_not_end_the_others(tmp_path):
    checks = ("none", "resume", "attention", "auto_batch", "speed", "fp16")
    output = tmp_path / "card.json"
    done = python("benchmarks/gpu_checks.py", *checks, "--output", output, fails=True)
    assert done.stderr.splitlines()[-1] == "failed: none", done.stderr
    assert done.stdout.count("largest difference") == 1
    record = read_json(output)
    outcomes = [outcome.split()[0] for outcome in record["checks"].values()]
    assert outcomes == ["failed:", "passed", "passed", "passed", "passed", "skipped:"]
    assert record["rows"][0]["tokens_per_second"]["median"] > 0


RECORD = read_json(ROOT / "benchmarks/results/cuda/card.json")
ROW = RECORD["rows"][0]
SPEED = ROW["tokens_per_second"]
WRONG = [
    {"machine": RECORD["machine"] | {"device": "H100 | 9"}},
    {"title": "[a](http://b)"},
    {"rows": [ROW | {"tokens_per_second": SPEED | {"median": math.nan}}]},
    {"rows": [ROW | {"memory": -1}]},
    {"expected": {name: [9.0] * 20 for name in RECORD["expected"]}},
]


@pytest.mark.parametrize("changes", [{}, *WRONG])
def test_a_record_of_others_changes_nothing_but_its_row(tmp_path, changes):
    path = tmp_path / "card.json"
    path.write_text(json.dumps(RECORD | changes))
    rows, refused = read_cards(tmp_path, [path])
    assert bool(rows) != bool(refused)
    assert bool(refused) == bool(changes)


MISTAKES = table("benchmarks/mistakes")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    return gpu_checks.conversations(tmp_path_factory.mktemp("updates"))


@pytest.fixture
def trajectory(conversations, tmp_path, monkeypatch):
    (tmp_path / "conversations").symlink_to(conversations)
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.setenv(name, "no")  # restored at the end
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return lambda precision: gpu_checks.trajectory(tmp_path, precision)


@long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_beyond_the_tolerance_of_each_precision(mistake, trajectory, monkeypatch):
    name, right, wrong = MISTAKES[mistake]
    function = resolve_name(name)
    code = inspect.getsource(function)
    assert code.count(right) == 1
    module = sys.modules[function.__module__]
    monkeypatch.setattr(module, function.__name__, function)  # restored at the end
    exec(code.replace(right, wrong), vars(module))
    actual = trajectory("fp32")
    expected = read_json(gpu_checks.EXPECTED)
    assert all(difference(actual, expected, each) for each in ("fp32", "fp16", "bf16"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_right_run_is_within_the_tolerance(precision, trajectory):
    expected = read_json(gpu_checks.EXPECTED)
    assert difference(trajectory(precision), expected, precision) == ""
