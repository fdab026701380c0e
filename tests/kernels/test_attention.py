"""Attention kernels: values and gradients equal those in fp64 within bf16's rounding."""

import pytest
import torch

from gpt2_accel.kernels import attention as module
from gpt2_accel.kernels.attention import (
    applies,
    blockwise_attention,
    causal_attention,
    explicit_attention,
)


def problem(T, B=2, H=3, D=16):
    """q, k, v as the model cuts them out of one tensor, and a gradient of the result."""
    qkv = torch.randn(B, T, 3 * H * D).to(torch.bfloat16).requires_grad_()
    return qkv, torch.randn(B, H, T, D).to(torch.bfloat16)


def gradients(function, qkv, grad):
    B, H, T, D = grad.shape
    parts = (part.view(B, T, H, D).transpose(1, 2) for part in qkv.split(H * D, dim=2))
    y = function(*parts)
    return y.detach(), *torch.autograd.grad(y, qkv, grad.to(y.dtype))


def reference(qkv, grad):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    qkv = qkv.detach().double().requires_grad_()
    return gradients(lambda q, k, v: sdpa(q, k, v, is_causal=True), qkv, grad)


@pytest.mark.parametrize(
    "function, T",
    [
        (explicit_attention, 1),
        (explicit_attention, 64),
        (blockwise_attention, 64),
        (blockwise_attention, 600),
    ],
)
def test_results_and_gradients_equal_those_in_fp64(function, T):
    qkv, grad = problem(T)
    first = function if function is explicit_attention else lambda *parts: function(*parts)[0]
    for found, expected in zip(gradients(first, qkv, grad), reference(qkv, grad), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("T, own", [(64, "explicit_attention"), (300, "blockwise_attention")])
def test_the_shape_chooses_in_a_compiled_model_too(T, own, monkeypatch):
    calls = []
    original = getattr(module, own)
    monkeypatch.setattr(module, own, lambda *parts: calls.append(1) or original(*parts))
    qkv, grad = problem(T)
    found = gradients(torch.compile(causal_attention, backend="aot_eager"), qkv, grad)
    assert calls
    for one, expected in zip(found, reference(qkv, grad), strict=True):
        assert (one.double() - expected).norm() / expected.norm() < 5e-3


def test_masks_other_dtypes_evaluation_and_long_eager_sequences_are_left_to_torch():
    short, long = (
        torch.zeros(1, 1, T, 8, dtype=torch.bfloat16).requires_grad_() for T in (64, 300)
    )
    mask = torch.ones(1, 1, 64, 64, dtype=bool).tril()
    assert applies(short, None, 0.5)
    assert not applies(short, mask, 0.0)
    assert not applies(short.float(), None, 0.0)
    assert not applies(long, None, 0.0)
    with torch.no_grad():
        assert not applies(short, None, 0.0)


def test_dropout_drops_other_probabilities_each_time():
    qkv, _ = problem(64)
    parts = [part.view(2, 64, 3, 16).transpose(1, 2) for part in qkv.split(48, dim=2)]
    first, second = (causal_attention(*parts, dropout=0.5).float().norm() for _ in range(2))
    assert first != second


def test_the_operators_are_ones_that_autograd_and_compilers_can_trust():
    qkv, _ = problem(64)
    parts = [part.view(2, 64, 3, 16).transpose(1, 2) for part in qkv.split(48, dim=2)]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(blockwise_attention, parts, test_utils=checks, atol=1e-2, rtol=1e-2)
