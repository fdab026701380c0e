"""bf16 attention on a CPU is what it is in fp64, within bf16's rounding, and so are its gradients."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_accel import attention as module
from gpt2_accel.attention import attention, causal_attention, written_out


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
    [(written_out, 1), (written_out, 64), (causal_attention, 64), (causal_attention, 600)],
)
def test_results_and_gradients_equal_those_in_fp64(function, T):
    qkv, grad = problem(T)
    first = function if function is written_out else lambda *parts: function(*parts)[0]
    for found, expected in zip(gradients(first, qkv, grad), reference(qkv, grad), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("T, own", [(64, "written_out"), (300, "causal_attention")])
def test_the_shape_chooses_in_a_compiled_model_too(T, own, monkeypatch):
    calls = []
    original = getattr(module, own)
    monkeypatch.setattr(module, own, lambda *parts: calls.append(1) or original(*parts))
    qkv, grad = problem(T)
    found = gradients(torch.compile(attention, backend="aot_eager"), qkv, grad)
    assert calls
    for one, expected in zip(found, reference(qkv, grad), strict=True):
        assert (one.double() - expected).norm() / expected.norm() < 5e-3


def test_dropout_masks_and_other_dtypes_are_torchs():
    qkv, _ = problem(300)
    parts = [part.view(2, 300, 3, 16).transpose(1, 2) for part in qkv.split(48, dim=2)]
    mask = torch.ones(2, 1, 300, 300, dtype=bool).tril()
    torch.testing.assert_close(
        attention(*parts, mask), F.scaled_dot_product_attention(*parts, attn_mask=mask)
    )
    wide = [part.float() for part in parts]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True)
    torch.testing.assert_close(attention(*wide), expected, rtol=0, atol=0)
    short = [part[:, :, :64] for part in parts]
    kept = [attention(*short, dropout=0.5).float().norm() for _ in range(2)]
    assert kept[0] != kept[1]


def test_the_operators_are_ones_that_autograd_and_compilers_can_trust():
    qkv, _ = problem(64)
    parts = [part.view(2, 64, 3, 16).transpose(1, 2) for part in qkv.split(48, dim=2)]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(causal_attention, parts, test_utils=checks, atol=1e-2, rtol=1e-2)
