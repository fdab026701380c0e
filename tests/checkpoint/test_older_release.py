"""Checkpoints of earlier releases resume bit for bit. `fixtures/make.py` made them, and what the releases computed."""

import json
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import losses, metrics
from launching import ROOT

from gpt2_accel.files import digest

sys.path.insert(0, str(ROOT / "tests/fixtures"))
from make import SAME_ON_EVERY_CPU

FIXTURES = ROOT / "tests/fixtures"


@pytest.mark.parametrize("release", ["0.1", "0.2", "0.3"])
def test_a_checkpoint_of_an_earlier_release_resumes_bit_for_bit(release, data_dir, tmp_path):
    made = json.loads((FIXTURES / f"checkpoint-{release}.json").read_text())
    shutil.copytree(FIXTURES / f"checkpoint-{release}", tmp_path / "old/checkpoint-4")
    flags = f"--data_dir {data_dir} --output_dir {tmp_path}/run --resume_from {tmp_path}/old/checkpoint-4"
    done = subprocess.run(
        [sys.executable, ROOT / "tests/train_script.py", *made["flags"].split(), *flags.split()],
        env=os.environ | SAME_ON_EVERY_CPU,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = losses(metrics(tmp_path / "run"))
    assert found == pytest.approx(made["losses"], abs=1e-4)
    if platform.machine() == "x86_64" and torch.__version__.startswith("2.13.0"):
        assert found == made["losses"]
        assert digest(tmp_path / "run/model.safetensors") == made["weights"]
