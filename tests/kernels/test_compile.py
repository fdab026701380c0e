"""Inductor's cache tells apart what inductor itself does not."""

import os
import subprocess
import sys

COMPILE = """
import torch
from gpt2_accel.kernels.cross_entropy import chunked_cross_entropy

torch.manual_seed(0)
x, weight = torch.randn(24, 8), torch.randn(128, 8)
print(*(part.norm().item() for part in chunked_cross_entropy(x, weight, torch.arange(24), 100, 12, True)))
"""


def test_code_compiled_for_other_instructions_is_not_taken_from_the_cache(tmp_path):
    def norms(**capability):
        env = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **capability}
        command = [sys.executable, "-c", COMPILE]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [round(float(value), 2) for value in done.stdout.split()]

    assert norms(ATEN_CPU_CAPABILITY="avx2") == norms()
