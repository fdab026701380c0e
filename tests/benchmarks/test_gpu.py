"""`make gpu`: its checks run on a CPU too, it needs no installation, and its record tells mistakes from rounding."""

import copy
import inspect
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import long, read_json
from launching import ROOT, python

sys.path.append(str(ROOT / "benchmarks"))

import gpu_checks
import table
from cards import difference, refusal
from results import machine

import gpt2_accel.data.loader
import gpt2_accel.train as loop

RUN = {"losses": [2.0, 1.0], "grad_norms": [1.0, 0.5]}
RECORD = {
    "machine": {**machine(), "device": "Tesla T4"},
    "versions": {"torch": torch.__version__},
    "commit": "0123456789abcdef",
    "checks": {"updates": "passed", "speed": "passed", "fsdp2": "skipped: it needs bf16"},
    "title": "GPT-2 124M",
    "rows": [{"setting": "fp16", "tokens_per_second": 9999, "memory": 2**31, "name": "ours"}],
    "updates": {"fp32": RUN, "fp16": RUN},
    "expected": RUN,
}


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


def closure(names: list[str]) -> set[str]:
    """Returns the distributions that the given ones need, and these."""
    found = set()
    while names:
        name = re.split(r"[^\w.-]", names.pop())[0]
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # of another system
            continue
        if name not in found:
            found.add(name)
            names += [word for word in required if "extra ==" not in word]
    return found


@long
def test_make_gpu_needs_no_installation_beyond_three_packages(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    for name in closure(["torch", "transformers", "accelerate"]):
        own = distribution(name)
        for top in {file.parts[0] for file in own.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(own.locate_file(top))
    assert (site / "numpy").exists() and not (site / "datasets").exists()
    output = tmp_path / "card.json"
    command = ["make", "gpu", f"PYTHON={sys.executable} -S"]  # -S skips the installed packages
    command += [f"GPU_tests=benchmarks/gpu_checks.py updates --inside --output {output}"]
    environment = os.environ | {"PYTHONPATH": str(site), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    record = read_json(output)
    assert record["outcome"] == "passed" and [*record["updates"]] == ["fp32", "bf16"]


# Mistakes that the record of a GPU has to show: a function, its code, and the wrong one.
MISTAKES = {
    "a learning rate of 1.05 times": (
        loop.run_updates,
        "set_learning_rate(optimizer, lr,",
        "set_learning_rate(optimizer, 1.05 * lr,",
    ),
    "gradients not divided by the accumulation": (
        loop.accumulate_gradients,
        "accelerator.backward(loss)",
        "accelerator.backward(loss * batch.divisor)",
    ),
    "the last micro-batch's loss": (
        loop.accumulate_gradients,
        'totals["loss"] += loss.detach()',
        'totals["loss"] = loss.detach() * batch.divisor',
    ),
    "all targets count": (
        gpt2_accel.data.loader.read_window,
        "np.where(tokens & COUNTS, ids, -100)",
        "ids",
    ),
}


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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_beyond_the_tolerance_of_each_precision(mistake, trajectory, monkeypatch):
    function, right, wrong = MISTAKES[mistake]
    code = inspect.getsource(function)
    assert code.count(right) == 1
    module = sys.modules[function.__module__]
    monkeypatch.setattr(module, function.__name__, function)  # restored at the end
    exec(code.replace(right, wrong), vars(module))
    found = trajectory("fp32")
    expected = read_json(gpu_checks.EXPECTED)
    assert all(difference(found, expected, each) for each in ("fp32", "fp16", "bf16"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_right_run_is_within_the_tolerance(precision, trajectory, monkeypatch):
    if precision == "fp16":  # which Accelerate does not have on a CPU

        def loss(model, batch):
            with torch.autocast("cpu", torch.float16):
                return loop.next_token_loss(model, batch)

        monkeypatch.setattr(
            gpu_checks, "run_training", lambda config: loop.train(config, objective=loss)
        )
    found = trajectory("fp32" if precision == "fp16" else precision)
    assert difference(found, read_json(gpu_checks.EXPECTED), precision) == ""


def changed(**changes) -> dict:
    """Returns `RECORD` with other values; None removes a field."""
    record = copy.deepcopy(RECORD) | changes
    return {name: value for name, value in record.items() if value is not None}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (changed(commit=None), "it lacks commit"),
        (changed(machine=RECORD["machine"] | {"device": ""}), "it lacks machine.device"),
        (changed(checks={"updates": "passed"}), "it lacks checks.speed"),
        (
            changed(checks=RECORD["checks"] | {"resume": "failed: 1.0 is not 2.0"}),
            "the check resume failed: 1.0 is not 2.0",
        ),
        (
            changed(updates={"fp16": RUN | {"grad_norms": [2.0, 1.0]}}),
            "fp16 has 2.0000 in place of 1.0000 in grad_norms, update 1",
        ),
        (changed(), ""),
    ],
)
def test_a_record_that_lacks_something_is_refused(record, reason):
    assert refusal(record) == reason


def test_the_table_has_the_records_of_others_and_names_those_it_refuses(tmp_path, monkeypatch):
    results = tmp_path / "results"
    (results / "contributed").mkdir(parents=True)
    page, docs = tmp_path / "README.md", tmp_path / "docs"
    docs.mkdir()
    page.write_text("<!-- bench cards -->\n<!-- /bench cards -->\n")
    flags = ["--results", str(results), "--docs", str(docs)]
    monkeypatch.setattr(sys, "argv", ["table.py", *flags])
    table.main()
    assert "No GPU figures yet" in page.read_text()
    (results / "contributed" / "t4.json").write_text(json.dumps(RECORD))
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "sent.json").write_text(json.dumps(changed(commit="dirty")))
    sent = [str(tmp_path / name) for name in ("sent.json", "bad.json")]
    monkeypatch.setattr(sys, "argv", ["table.py", *flags, *sent])
    with pytest.raises(SystemExit, match=r"bad\.json is refused: it cannot be read as a record"):
        table.main()
    row = rf"\| Tesla T4 \(contributed\) \| fp16 \| 9,999 \| 2.00 \| GPT-2 124M, torch {torch.__version__}"
    assert len(re.findall(re.sub(r"\+", r"\\+", row), page.read_text())) == 2


def test_the_notebook_writes_the_record(monkeypatch):
    cells = read_json(ROOT / "recipes/notebook.ipynb")["cells"]
    commands = []
    monkeypatch.setattr(subprocess, "run", commands.append)
    gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    exec("".join(cells[-1]["source"]), {"torch": gpu})
    script = Path(gpu_checks.__file__)
    assert commands == [[sys.executable, script, "--output", "gpu.json"]]
