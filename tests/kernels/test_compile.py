"""The key of inductor's cache includes the CPU's instruction set and the code of our operators."""

import os
import subprocess
import sys

import pytest
from conftest import long

COMPILE = """
import torch
from gpt2_accel.kernels.compile import fused

rows = fused(lambda x: (x.bfloat16().float().exp() + x).sum(1))
print(rows(torch.linspace(-3, 3, 24 * 33).view(24, 33)).norm().item())
"""


@long
def test_cached_code_for_another_instruction_set_is_not_used(tmp_path):
    def norm(**capability):
        env = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | capability
        command = [sys.executable, "-c", COMPILE]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    assert norm(ATEN_CPU_CAPABILITY="avx2") == pytest.approx(norm())
