"""Block masks of documents: equal to FlexAttention's own masks, and to the dense mask in the model."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import gpt2_accel.models.gpt2 as gpt2
from gpt2_accel import GPT, GPTConfig, kernels
from gpt2_accel.kernels.block_attention import document_blocks
from gpt2_accel.models.parts import document_mask
from gpt2_accel.models.qwen3 import Qwen3Config


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 1.0], ids=["none", "few", "many", "all"])
@pytest.mark.parametrize("length", [64, 300, 512])
def test_blocks_equal_those_of_create_block_mask(length, share):
    separators = (torch.rand(3, length) < share).long()
    mask = document_blocks(separators.cumsum(1))
    sizes = (3, None, length, length)
    expected = create_block_mask(mask.mask_mod, *sizes, device="cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    if length % 128 == 0:
        assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(
        create_mask(mask.mask_mod, *sizes, device="cpu"), document_mask(separators.cumsum(1))
    )


def not_called(*_, **__):
    raise AssertionError("attention has a dense mask")


@pytest.mark.filterwarnings("ignore")  # of FlexAttention on a CPU
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "kind", [GPTConfig, partial(Qwen3Config, n_kv_head=1, head_dim=16, n_inner=64)]
)
def test_model_with_block_masks_equals_the_dense_mask(kind, compiled, monkeypatch):
    model = kind(50, n_positions=200, n_layer=2, n_head=2, n_embd=32).build().eval()
    model.separator = 7
    tokens = torch.randint(50, (2, 200))
    with torch.no_grad():
        dense = model(tokens)
    with torch.no_grad(), kernels.chosen(block_masks=True):
        monkeypatch.setattr(gpt2.F, "scaled_dot_product_attention", not_called)
        forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        torch.testing.assert_close(forward(tokens), dense, atol=1e-5, rtol=1e-4)


def test_dropout_and_narrow_heads_keep_the_dense_mask():
    for changes in ({"dropout": 0.1}, {"n_head": 4}):
        shape = {"n_positions": 32, "n_layer": 1, "n_head": 2, "n_embd": 32, **changes}
        model = GPT(GPTConfig(50, **shape))
        model.separator = 7
        with kernels.chosen(block_masks=True):
            model(torch.randint(50, (2, 32)))
