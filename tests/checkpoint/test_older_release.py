"""A checkpoint of release 0.1 resumes bit for bit.

`fixtures/checkpoint-0.1` is `checkpoint-4` of a run with the settings below. `EXPECTED` has the losses of updates 5 to
8 in that release. Both were computed with the baseline instructions of x86 CPUs.
"""

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

SETTINGS = (
    "--n_layer 1 --n_head 2 --n_embd 16 --n_positions 16 --micro_batch_size 4 --total_batch_size 128 --max_steps 8 "
    "--learning_rate 1e-2 --warmup_steps 2 --log_every 1 --eval_every 4 --sample_every 0 --save_every 4 --keep_last 5 "
    "--spike_z 6 --dropout 0.1"
)
EXPECTED = [4.7575883865356445, 4.549687385559082, 4.397190093994141, 4.334525108337402]
WEIGHTS = "5432ab398e80e0df1c31c68d2e67b1ad37990fc24bce204fef79db583f55e661"  # SHA-256, after 8
SAME_ON_EVERY_CPU = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}


def test_a_checkpoint_of_release_0_1_resumes_bit_for_bit(data_dir, tmp_path):
    shutil.copytree(ROOT / "tests/fixtures/checkpoint-0.1", tmp_path / "old/checkpoint-4")
    flags = f"--data_dir {data_dir} --output_dir {tmp_path}/run --resume_from {tmp_path}/old/checkpoint-4"
    done = subprocess.run(
        [sys.executable, ROOT / "tests/train_script.py", *SETTINGS.split(), *flags.split()],
        env=os.environ | SAME_ON_EVERY_CPU,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = losses(metrics(tmp_path / "run"))
    assert found == pytest.approx(EXPECTED, abs=1e-4)
    if platform.machine() == "x86_64" and torch.__version__.startswith("2.13.0"):
        assert found == EXPECTED
        assert digest(tmp_path / "run/checkpoint-8/model.safetensors") == WEIGHTS
