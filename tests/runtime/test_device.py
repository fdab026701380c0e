"""Properties of the machine, and their overrides by an environment variable."""

import json

import pytest
import torch
from tables import table

from gpt2_accel.runtime import device


def test_a_cpu_limited_to_avx2_has_no_bf16_units(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert not device.has_bf16(torch.device("cpu"))


@pytest.mark.parametrize(("name", "expected"), table("runtime/cases")["peak flops"])
def test_peak_flops_follow_from_the_device_name(name, expected):
    assert device.peak_flops(name) == expected


@pytest.mark.parametrize(
    "major, first", [(7, "EFFICIENT"), (8, "FLASH"), (9, "CUDNN"), (10, "CUDNN")]
)
def test_attention_kernels_follow_the_compute_capability(monkeypatch, major, first):
    monkeypatch.setenv(device.OVERRIDES, json.dumps({"compute_capability": [major, 0]}))
    gpu = torch.device("cuda")
    order = device.attention_order(gpu, deterministic=False)
    assert order[0] == f"{first}_ATTENTION"
    assert order[-1] == "MATH"
    flash = ("FLASH_ATTENTION",) if major >= 8 else ()
    assert device.attention_order(gpu, deterministic=True) == (*flash, "MATH")
    assert device.has_block_masks(gpu) is (major >= 8)
