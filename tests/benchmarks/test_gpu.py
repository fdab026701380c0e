"""`make gpu`: its steps go on after a failure, its parts run without a GPU, and its results reach the page."""

import json
import os
import subprocess
import sys
import sysconfig

import pytest
from conftest import LONG
from launching import ROOT, python

sys.path.append(str(ROOT / "benchmarks"))

import gpu
import table


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that runs `gpu.py` on given parts with given steps, and returns its results and exit code."""

    def run(parts, steps):
        monkeypatch.setattr(gpu, "steps", lambda part, *_: steps[part])
        monkeypatch.setattr(gpu, "has_gpu", lambda: False)
        monkeypatch.setattr(sys, "argv", ["gpu.py", *parts, "--results", str(tmp_path)])
        code = None
        try:
            gpu.main()
        except SystemExit as end:
            code = end.code
        return json.loads((tmp_path / "cpu" / "gpu.json").read_text())["parts"], code

    return run


def step(name, code, seconds=60):
    return gpu.Step(name, ("-c", code), seconds)


def test_a_failed_or_endless_step_does_not_end_the_part_and_parts_are_merged(command):
    failing = "print('before'); raise SystemExit(3)"
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    steps = {
        "tests": [
            step("a", failing),
            step("b", endless, 1),
            step("c", "print('skipped: a reason')"),
        ],
        "bench": [step("d", "print(1)")],
    }
    found, code = command(["tests"], steps)
    assert code == "failed: a, b"
    assert found["tests"]["a"]["outcome"] == "failed: exit code 3"
    assert found["tests"]["a"]["output"] == ["before"]
    assert found["tests"]["b"]["outcome"] == "failed: took longer than 1 s"
    assert found["tests"]["b"]["seconds"] < 30
    assert found["tests"]["c"]["outcome"] == "skipped: a reason"
    found, code = command(["bench"], steps)
    assert code is None and found["bench"]["d"]["outcome"] == "ok" and "tests" in found


@pytest.mark.parametrize("cuda", [False, True])
def test_every_part_has_steps_that_fit_into_its_time(tmp_path, cuda):
    for part in gpu.PARTS:
        found = gpu.steps(part, cuda, tmp_path)
        assert found and all(step.seconds <= gpu.LONGEST == 480 for step in found)
        assert part == "tests" or sum(step.seconds for step in found) <= gpu.LONGEST
        assert all((ROOT / "benchmarks" / step.command[0]).is_file() for step in found)


def test_all_checks_are_steps():
    import gpu_checks

    assert all(callable(getattr(gpu_checks, name)) for name in gpu.CHECKS)


@pytest.mark.parametrize("name", ["resume", "auto_batch"])
def test_checks_run_on_a_cpu(name):
    done = python("benchmarks/gpu_checks.py", name)
    assert done.returncode == 0, done.stderr


def test_profile_has_ten_operations_and_a_trace(tmp_path):
    done = python("benchmarks/profile_updates.py", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cpu/profile.json").read_text())
    shares = [operation["share"] for operation in found["operations"]]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1
    assert (tmp_path / "cpu/trace.json.gz").stat().st_size > 1000


def test_kernels_are_measured(tmp_path):
    done = python("benchmarks/kernels.py", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cpu/kernels.json").read_text())
    assert all("milliseconds" in one for one in found["loss"].values())
    assert "problem" in found["attention"]["cudnn_attention"]


def test_results_of_a_gpu_are_tables_of_the_page(tmp_path):
    assert "not measured, no GPU available" in table.gpu(tmp_path)
    (tmp_path / "cuda").mkdir()
    machine = {"type": "cuda", "device": "a GPU", "torch": "2", "date": "2026-01-01"}
    spread = {"median": 2.0, "low": 1.0, "high": 3.0}
    contestant = {"bf16": True, "compile": True, "tokens_per_second": spread, "memory": 2**31}
    contestant["seconds"] = [1.0, 1.1]
    figures = {"shape": {"n_positions": 1024}, "batch_size": 16}
    figures |= {"machine": machine, "contestants": {"gpt2_accel": contestant}}
    for name in ("micro_batch", "switches"):
        (tmp_path / "cuda" / f"training-{name}.json").write_text(json.dumps(figures))
    found = json.loads((tmp_path / "cuda/training-micro_batch.json").read_text())
    assert table.gpu_speed(found)[2:] == ("2 (1 to 3)", "")
    found["machine"]["device"] = "NVIDIA H100 80GB HBM3"
    assert table.gpu_speed(found)[3] == "no"
    assert table.gpu(tmp_path).count("| gpt2_accel | bf16, compiled | 2 (1 to 3) | 2.00 |") == 2


HIDDEN = ("datasets", "evaluate", "wandb", "pytest", "matplotlib", "tiktoken")


@pytest.mark.skipif(not LONG, reason="takes minutes: RELIABILITY=long")
def test_all_parts_run_on_a_bare_machine(tmp_path):
    """Without a GPU and the packages of `HIDDEN`, as `make gpu` starts them."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as m\n"
        "plain = m.PathFinder.find_spec\n"
        "def find_spec(cls, name, path=None, target=None):\n"
        f"    hidden = name.split('.')[0] in {HIDDEN!r}\n"
        "    return None if hidden else plain(name, path, target)\n"
        "m.PathFinder.find_spec = classmethod(find_spec)\n"
    )
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *gpu.PARTS, "--results", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    parts = json.loads((tmp_path / "cpu/gpu.json").read_text())["parts"]
    assert parts.keys() == set(gpu.PARTS)
    written = {path.name for path in (tmp_path / "cpu").rglob("*") if path.is_file()}
    assert {"training-tiny.json", "kernels.json", "generate.json", "profile.json"} <= written
    assert {"trace.json.gz", "speed_ladder.md"} <= written


def test_a_step_for_which_no_time_is_left_is_not_started(command, monkeypatch):
    """It did not fail: a second call has time for it."""
    monkeypatch.setattr(gpu, "LONGEST", 11)
    steps = {"tests": [step("a", "import time; time.sleep(2)"), step("b", "print(1)")]}
    found, code = command(["tests"], steps)
    assert code == "not started: b"
    assert found["tests"]["a"]["outcome"] == "ok"
    assert found["tests"]["b"]["outcome"] == "not started: the part's 11 s are over"


def test_make_gpu_needs_no_installation():
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    command = [
        "make",
        "gpu",
        "PART=none",
        f"PYTHON={sys.executable} -S",
    ]  # -S skips the installed package
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "invalid choice: 'none'" in done.stderr, done.stderr
