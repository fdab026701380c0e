"""`make gpu`: its checks run on a CPU too, and it needs no installation."""

import os
import subprocess
import sys
import sysconfig

import pytest
from conftest import LONG
from launching import ROOT, python

HIDDEN = ("datasets", "evaluate", "wandb", "pytest", "matplotlib", "tiktoken")


def test_checks_run_on_a_cpu_and_a_failure_does_not_end_the_others(monkeypatch):
    done = python("benchmarks/gpu_checks.py", "none", "resume", "auto_batch", fails=True)
    assert done.stderr.splitlines()[-1] == "failed: none", done.stderr
    assert done.stdout.count("largest difference") == 1


@pytest.mark.skipif(not LONG, reason="takes minutes: RELIABILITY=long")
def test_all_checks_run_on_a_bare_machine(tmp_path):
    """Without a GPU and the packages of `HIDDEN`."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as m\n"
        "plain = m.PathFinder.find_spec\n"
        "def find_spec(cls, name, path=None, target=None):\n"
        f"    hidden = name.split('.')[0] in {HIDDEN!r}\n"
        "    return None if hidden else plain(name, path, target)\n"
        "m.PathFinder.find_spec = classmethod(find_spec)\n"
    )
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_checks.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr


def test_make_gpu_needs_no_installation():
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    python = f"PYTHON={sys.executable} -S"  # -S skips the installed package
    for part, words in (("bench", "invalid choice: 'none'"), ("none", "PART is tests, bench")):
        command = ["make", "gpu", f"PART={part}", python, "GPU_bench=benchmarks/measure.py none"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode and words in done.stderr, done.stderr
