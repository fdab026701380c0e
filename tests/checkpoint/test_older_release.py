"""A checkpoint of release 0.5 resumes with the same losses.

`fixtures/README.md` says how they were made.
"""

import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import losses, metrics, read_json
from launching import ROOT

FIXTURES = ROOT / "tests/fixtures"
SAME_ON_EVERY_CPU = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",  # without ROUNDING
}


def test_a_checkpoint_of_release_0_5_resumes_with_the_same_losses(data_dir, tmp_path):
    made = read_json(FIXTURES / "checkpoint-0.5.json")
    shutil.copytree(FIXTURES / "checkpoint-0.5", tmp_path / "old/checkpoint-4")
    settings = made["flags"].split()
    flags = f"--data_dir {data_dir} --output_dir {tmp_path}/run"
    flags += f" --resume_from {tmp_path}/old/checkpoint-4"
    done = subprocess.run(
        [sys.executable, ROOT / "tests/train_script.py", *settings, *flags.split()],
        env=os.environ | SAME_ON_EVERY_CPU,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    actual = losses(metrics(tmp_path / "run"))
    assert actual == pytest.approx(made["losses"], abs=1e-4)
    if platform.machine() == "x86_64" and torch.__version__.startswith("2.13.0"):
        assert actual == made["losses"]
