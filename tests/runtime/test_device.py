"""Properties of the machine, and their overrides by an environment variable."""

import json
import subprocess
import sys

import pytest
import torch

from gpt2_accel.runtime import device


def test_cpu_limited_to_avx2_has_no_bf16_units():
    code = "import torch; from gpt2_accel.runtime.device import has_bf16\n"
    code += "print(has_bf16(torch.device('cpu')))"
    env = {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("Tesla T4", 65e12),
        ("NVIDIA H200 NVL", None),
    ],
)
def test_peak_flops_follow_from_the_device_name(name, expected):
    assert device.peak_flops(name) == expected


def of_capability(monkeypatch, major, minor=0):
    """Returns a CUDA device that reports this compute capability."""
    monkeypatch.setenv(device.OVERRIDES, json.dumps({"compute_capability": [major, minor]}))
    return torch.device("cuda")


@pytest.mark.parametrize(
    "major, first", [(7, "EFFICIENT"), (8, "FLASH"), (9, "CUDNN"), (10, "CUDNN")]
)
def test_attention_kernels_follow_the_compute_capability(monkeypatch, major, first):
    gpu = of_capability(monkeypatch, major)
    order = device.attention_order(gpu, deterministic=False)
    assert order[0] == f"{first}_ATTENTION"
    assert order[-1] == "MATH"
    flash = ("FLASH_ATTENTION",) if major >= 8 else ()
    assert device.attention_order(gpu, deterministic=True) == (*flash, "MATH")
    assert device.has_block_masks(gpu) is (major >= 8)
