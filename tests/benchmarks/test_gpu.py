"""`make gpu`: its checks run on a CPU too, and it needs no installation."""

import os
import subprocess
import sys
import sysconfig

from conftest import long
from launching import ROOT, python


@long
def test_checks_run_on_a_cpu_and_a_failure_does_not_end_the_others(monkeypatch):
    done = python("benchmarks/gpu_checks.py", "none", "resume", "auto_batch", fails=True)
    assert done.stderr.splitlines()[-1] == "failed: none", done.stderr
    assert done.stdout.count("largest difference") == 1


def test_make_gpu_needs_no_installation():
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    python = f"PYTHON={sys.executable} -S"  # -S skips the installed package
    for part, words in (("bench", "invalid choice: 'none'"), ("none", "PART is tests, bench")):
        command = ["make", "gpu", f"PART={part}", python, "GPU_bench=benchmarks/measure.py none"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode and words in done.stderr, done.stderr
