"""A Linear whose bias gradient is a product: the same gradients as `nn.Linear` in fp64."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_accel import kernels
from gpt2_accel.kernels.linear import Linear


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_gradients_equal_those_of_a_plain_linear(dtype, tolerance, compiled, monkeypatch):
    monkeypatch.setattr(kernels, "choices", kernels.choices)
    kernels.choose(bias_products=True)
    layer = Linear(24, 40)
    x = torch.randn(3, 50, 24, requires_grad=True)
    grad = torch.randn(3, 50, 40)
    call = torch.compile(layer) if compiled else layer
    with torch.autocast("cpu", dtype):
        y = call(x)
    assert y.dtype == dtype
    y.backward(grad.to(dtype))
    inputs = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = F.linear(*inputs)
    expected.backward(grad.double())
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=3 * tolerance)
    for actual, reference in zip((x, layer.weight, layer.bias), inputs, strict=True):
        apart = (actual.grad - reference.grad).norm() / reference.grad.norm()
        assert apart < tolerance


def test_single_precision_is_that_of_a_plain_linear(monkeypatch):
    monkeypatch.setattr(kernels, "choices", kernels.choices)
    kernels.choose(bias_products=True)
    layer = Linear(24, 40)
    x = torch.randn(5, 24)
    grad = torch.randn(5, 40)
    layer(x).backward(grad)
    assert torch.equal(layer.bias.grad, grad.sum(0))
