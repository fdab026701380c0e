"""The attention kernel: its error relative to fp64 is about that of torch's attention, at each scale of the scores."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from gpt2_accel import GPT, GPTConfig, kernels
from gpt2_accel.device import OVERRIDES, attention_order
from gpt2_accel.kernels import attention as module
from gpt2_accel.kernels.attention import (
    applies,
    attention_backward,
    causal_attention,
    takes_groups,
)
from gpt2_accel.models.parts import attend

sdpa = torch.nn.functional.scaled_dot_product_attention


def problem(T, B=2, H=3, D=16, scale=1.0):
    """Returns q, k and v in one tensor, as in the model, with q and k times `scale`, and a gradient of the output."""
    qkv = torch.randn(B, T, 3, H * D)
    qkv[:, :, :2] *= scale
    return qkv.flatten(2).to(torch.bfloat16).requires_grad_(), torch.randn(B, H, T, D).bfloat16()


def cut(qkv, H, D):
    return [part.view(*qkv.shape[:2], H, D).transpose(1, 2) for part in qkv.split(H * D, dim=2)]


def gradients(function, qkv, grad):
    """Returns the output and the gradients of q, k and v, (B, H, T, D) each."""
    _, H, _, D = grad.shape
    y = function(*cut(qkv, H, D))
    (found,) = torch.autograd.grad(y, qkv, grad.to(y.dtype))
    return y.detach(), *cut(found, H, D)


def torch_attention(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def errors(function, qkv, grad):
    """Returns the relative errors of the output and the gradients, compared with fp64."""
    exact = gradients(torch_attention, qkv.detach().double().requires_grad_(), grad)
    found = gradients(function, qkv, grad)
    assert all(part.dtype == torch.bfloat16 for part in found)
    pairs = zip(found, exact, strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


@pytest.mark.parametrize("scale", [0.5, 1, 4])
@pytest.mark.parametrize("T", [8, 128])
@pytest.mark.parametrize("D", [16, 48, 64])
def test_output_and_gradients_are_as_exact_as_torch(T, scale, D):
    torch.manual_seed(0)
    qkv, grad = problem(T, B=512 // T, H=4, D=D, scale=scale)
    own, limits = (errors(run, qkv, grad) for run in (causal_attention, torch_attention))
    for name, error, limit in zip(("y", "dq", "dk", "dv"), own, limits, strict=True):
        assert error <= 1.2 * limit + 1e-4, name


def test_kernel_applies_only_to_short_causal_bf16_training():
    short, long = (
        torch.zeros(1, 1, T, 8, dtype=torch.bfloat16).requires_grad_() for T in (128, 129)
    )
    mask = torch.ones(1, 1, 128, 128, dtype=bool).tril()
    assert applies(short, None, 0.0)
    assert not applies(short, mask, 0.0)
    assert not applies(short, None, 0.5)
    assert not applies(short.float(), None, 0.0)
    assert not applies(long, None, 0.0)
    with torch.no_grad():
        assert not applies(short, None, 0.0)


def test_operator_passes_opcheck():
    qkv, grad = problem(64)
    parts = [part.detach() for part in cut(qkv, 3, 16)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y, log_sums = flash(*parts, is_causal=True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(attention_backward, (grad, *parts, y, log_sums), test_utils=checks)


@pytest.mark.parametrize("length", [128, 100])
def test_causal_attention_of_the_model_prefers_the_kernels_of_the_device(length, monkeypatch):
    """cuDNN is left out for lengths that are not a multiple of 128, and for other than causal attention."""
    order = ("CUDNN_ATTENTION", "MATH", "FLASH_ATTENTION")
    model = GPT(GPTConfig(50, n_positions=128, n_layer=1, n_head=2, n_embd=32)).eval()
    tokens = torch.randint(50, (2, length))
    before, seen = _cur_sdpa_kernel_backends(with_priority=True), []

    plain = torch.nn.functional.scaled_dot_product_attention

    def spied(*args, **kwargs):
        seen.append([kind.name for kind in _cur_sdpa_kernel_backends(with_priority=True)])
        return plain(*args, **kwargs)

    torch._dynamo.reset()
    with torch.no_grad(), kernels.chosen(sdpa_order=order):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
        torch.testing.assert_close(model(tokens), compiled)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        model(tokens, attention_mask=mask[None, None])
    assert seen[0] == [name for name in order if length == 128 or "CUDNN" not in name]
    assert seen[1] == ["MATH", "FLASH_ATTENTION"]
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.mark.parametrize(
    ("capability", "dtype", "masked", "groups"),
    [
        ((9, 0), torch.bfloat16, False, True),
        ((9, 0), torch.bfloat16, True, False),
        ((9, 0), torch.float32, False, False),
        ((7, 5), torch.float16, False, False),
    ],
)
def test_keys_are_repeated_where_no_fused_kernel_takes_groups(
    capability, dtype, masked, groups, monkeypatch
):
    """Torch's plain attention, which it takes otherwise, keeps all scores in memory."""
    monkeypatch.setenv(OVERRIDES, json.dumps({"compute_capability": capability}))
    q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    with kernels.chosen(sdpa_order=attention_order(torch.device("cuda"), False)):
        assert takes_groups(q, torch.ones(1) if masked else None) == groups


@pytest.mark.parametrize("causal", [True, False])
def test_repeated_keys_change_nothing(causal, monkeypatch):
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    mask = None if causal else torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    grouped = attend(q, k, v, mask)
    monkeypatch.setattr(module, "takes_groups", lambda *_: False)
    torch.testing.assert_close(attend(q, k, v, mask), grouped)
