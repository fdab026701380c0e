"""Attention: the kernels of torch by device, and block masks, which equal the dense mask."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, kernel_choices
from families import own_shape

from gpt2_accel.kernels import attention as module
from gpt2_accel.models.parts import attend


@pytest.mark.parametrize("T, short", [(32, True), (128, True), (129, False)])
def test_short_attention_in_bf16_on_a_cpu_is_computed_in_fp32(T, short):
    """Under autocast too. It rounds less, and trains faster."""
    q, k, v = (torch.randn(2, 3, T, 16).bfloat16().requires_grad_() for _ in range(3))
    in_fp32 = attend(q.float(), k.float(), v.float(), None).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        actual = attend(q, k, v, None)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, in_fp32) == short
    exact = attend(q.double(), k.double(), v.double(), None)
    assert (actual - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("causal", [True, False])
def test_repeated_keys_change_nothing(causal, monkeypatch):
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    mask = None if causal else torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    grouped = attend(q, k, v, mask)
    monkeypatch.setattr(module, "takes_groups", lambda *_: False)
    torch.testing.assert_close(attend(q, k, v, mask), grouped)


@pytest.mark.filterwarnings("ignore")  # of FlexAttention on a CPU
@pytest.mark.parametrize(("kind", "compiled"), [("gpt2", False), ("qwen3", True)])
def test_model_with_block_masks_equals_the_dense_mask(kind, compiled, monkeypatch):
    model = own_shape(kind, vocab_size=50, n_positions=200).build().eval()
    model.separator = 7
    tokens = torch.randint(50, (2, 200))
    with torch.no_grad():
        dense = model(tokens)
    with torch.no_grad(), kernel_choices(block_masks=True):
        # Which has a dense mask: it is not called.
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_, **__: 1 / 0)
        forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        assert_close(forward(tokens), dense)
