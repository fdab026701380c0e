"""The key of inductor's cache includes the CPU's instruction set and the code of our operators."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import long
from launching import ROOT

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


COMPILE_LOSS = """
import torch
from gpt2_accel.kernels.cross_entropy import chunked_cross_entropy
from gpt2_accel.runtime.accelerator import build_accelerator

build_accelerator()
x, weight, targets = torch.randn(24, 8), torch.randn(128, 8), torch.arange(24)
loss = lambda x: chunked_cross_entropy(x, weight, targets, 100, 12, False, None)
torch.compile(lambda x: loss(x)[1] + 1)(x)
"""


@long
def test_code_compiled_by_another_release_is_not_reused(tmp_path):
    shutil.copytree(ROOT / "gpt2_accel", tmp_path / "gpt2_accel")

    def compile_loss():
        return subprocess.run(
            [sys.executable, "-c", COMPILE_LOSS],
            cwd=tmp_path,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": "."},
            capture_output=True,
            text=True,
        )

    assert compile_loss().returncode == 0
    path = tmp_path / "gpt2_accel" / "kernels" / "cross_entropy.py"
    text = path.read_text()
    # The other release has another memory layout of the gradient.
    layouts = {
        "return total, grad_x,": "return total, grad_x.t().contiguous().t(),",
        "empty_like(x), grad_w": "empty_like(x).t().contiguous().t(), grad_w",
    }
    for old, new in layouts.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    done = compile_loss()
    assert done.returncode == 0, done.stderr
