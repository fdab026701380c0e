"""GELU kernel: values and gradients equal torch's within rounding."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_accel.kernels import gelu
from gpt2_accel.kernels.gelu import tanh_gelu


def with_gradient(function, x):
    y = function(x)
    return y.detach(), *torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradient_equal_fp64(dtype, rounding):
    x = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])])
    x = x.to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = with_gradient(lambda x: F.gelu(x, approximate="tanh"), exact)
    for found, wanted in zip(with_gradient(tanh_gelu, x), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=rounding)


def test_kernel_applies_only_to_compiled_tanh_gelu():
    def choose(x):
        return x + 1 if gelu.applies(x, "tanh") else x

    def exact(x):
        return x + 1 if gelu.applies(x, "none") else x

    x = torch.zeros(4)
    assert not choose(x).any()
    assert torch.compile(choose, backend="aot_eager")(x).all()
    assert not torch.compile(exact, backend="aot_eager")(x).any()
