"""Shapes, dtypes and devices without gradients, on fake tensors of another device."""

from contextlib import nullcontext

import pytest
import torch
from conftest import kernel_choices
from families import own_shape
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2_accel.config import ARCHITECTURES

OTHER = torch.device("meta")  # stands for a GPU: a build for CPUs cannot index fake CUDA tensors


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    # Autocast does not have this device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    allowed = config.patch(fake_tensor_allow_meta=True)
    with allowed, FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


def build(architecture):
    with OTHER:
        return own_shape(architecture, vocab_size=300, n_positions=256).build()


def tokens():
    return torch.zeros(4, 256, dtype=torch.int64, device=OTHER)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mask", [None, "dense", "blocks"])
def test_forward_and_loss_stay_on_their_device(architecture, mask, monkeypatch):
    monkeypatch.setattr("gpt2_accel.kernels.attention.compiled_attention", lambda: without)
    model = build(architecture)
    model.separator = None if mask is None else 7
    with kernel_choices(block_masks=mask == "blocks"):
        logits, loss = model(tokens()), model(tokens(), tokens())
        each = model(tokens(), tokens(), reduction="none")
    assert logits.shape == (4, 256, 300)
    assert logits.device == loss.device == OTHER
    assert loss.shape == ()
    assert each.shape == (4, 256)
    assert loss.dtype == each.dtype == torch.float32


def without(q, k, v, block_mask, enable_gqa):
    """Stands for compiled FlexAttention, which is not traced on fake tensors."""
    assert block_mask.kv_num_blocks.device == OTHER
    assert block_mask.shape == (4, 1, 256, 256)
    return torch.empty_like(q)
