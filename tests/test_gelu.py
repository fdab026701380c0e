"""The GELU of a compiled model on a CPU is torch's within rounding, and so is its slope."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_accel import gelu as module
from gpt2_accel.gelu import gelu, tanh_gelu


def with_slope(function, x):
    y = function(x)
    return y.detach(), *torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_value_and_slope_equal_those_in_fp64(dtype, rounding):
    x = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])])
    x = x.to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = with_slope(lambda x: F.gelu(x, approximate="tanh"), exact)
    for found, wanted in zip(with_slope(tanh_gelu, x), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("approximate, compiled, own", [("tanh", True, 1), ("tanh", False, 0), ("none", True, 0)])  # fmt: skip
def test_only_a_compiled_tanh_is_replaced(approximate, compiled, own, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "tanh_gelu", lambda x: calls.append(1) or tanh_gelu(x))
    function = torch.compile(gelu, backend="aot_eager") if compiled else gelu
    x = torch.randn(64)
    found = function(x, approximate)
    assert len(calls) == own
    expected = F.gelu(x, approximate=approximate)
    if own:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, expected)
