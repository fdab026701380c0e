"""All kernels together: a model without them runs plain PyTorch, with equal results."""

import torch
import torch.nn.functional as F
from conftest import kernel_choices

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.kernels import cross_entropy


def step(model, tokens):
    """Returns loss and gradients in bf16 autocast, as in training."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens.roll(-1, 1))
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def test_loss_and_gradients_are_equal_without_kernels(monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 40 * 128)  # several chunks at this size
    model = GPT(GPTConfig(100, n_positions=48, n_layer=2, n_head=2, n_embd=32))
    tokens = torch.randint(100, (4, 48))
    with_kernels = step(model, tokens)
    calls = []
    for name in ("scaled_dot_product_attention", "cross_entropy"):
        plain = getattr(F, name)
        monkeypatch.setattr(F, name, lambda *a, f=plain, **k: calls.append(f) or f(*a, **k))
    with kernel_choices(enabled=False):
        without = step(model, tokens)
    assert len(calls) == 3  # two layers and the head
    assert abs(with_kernels[0] - without[0]) < 2e-3 * without[0]
    for one, other in zip(with_kernels[1], without[1], strict=True):
        assert (one - other).norm() < 2e-2 * other.norm()
