"""`make gpu`: its steps go on after a failure, and its parts run without a GPU."""

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


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that runs `gpu.py` on given parts with given code as steps, and returns its results and exit code."""

    def run(parts, steps):
        commands = {part: {n: ["-c", c] for n, c in own.items()} for part, own in steps.items()}
        monkeypatch.setattr(gpu, "steps", lambda part, _: commands[part])
        monkeypatch.setattr(sys, "argv", ["gpu.py", *parts, "--results", str(tmp_path)])
        code = None
        try:
            gpu.main()
        except SystemExit as end:
            code = end.code
        return json.loads((tmp_path / "cpu" / "gpu.json").read_text())["parts"], code

    return run


def test_a_failed_or_endless_step_does_not_end_the_part_and_parts_are_merged(command, monkeypatch):
    monkeypatch.setattr(gpu, "LONGEST", 16)  # a step that no time is left for did not fail
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    steps = {
        "tests": {
            "a": "print('before'); raise SystemExit(3)",
            "b": "print('skipped: a reason')",
            "c": endless,
            "d": "print(1)",
        },
        "bench": {"e": "print(1)"},
    }
    found, code = command(["tests"], steps)
    assert code == "failed: a, c\nnot started: d"
    assert found["tests"]["a"]["outcome"] == "failed: exit code 3"
    assert found["tests"]["a"]["output"] == ["before"]
    assert found["tests"]["b"]["outcome"] == "skipped: a reason"
    assert found["tests"]["c"]["outcome"].startswith("failed: took longer than 1")
    assert found["tests"]["c"]["seconds"] < 30
    assert found["tests"]["d"]["outcome"] == "not started: the part's 16 s are over"
    found, code = command(["bench"], steps)
    assert code is None and found["bench"]["e"]["outcome"] == "ok" and "tests" in found


@pytest.mark.parametrize("name", ["resume", "auto_batch"])
def test_checks_run_on_a_cpu(name):
    done = python("benchmarks/gpu_checks.py", name)
    assert done.returncode == 0, done.stderr


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
    assert {"tiny.json", "ladder.json"} <= written


def test_make_gpu_needs_no_installation():
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    python = f"PYTHON={sys.executable} -S"  # -S skips the installed package
    command = ["make", "gpu", "PART=none", python]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "invalid choice: 'none'" in done.stderr, done.stderr
