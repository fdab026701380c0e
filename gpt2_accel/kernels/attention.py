"""Attention by hardware: the order of torch's kernels, and FlexAttention within documents on a GPU.

A dense mask, (B, 1, T, T), excludes flash attention. FlexAttention (Dong et al., 2024,
arXiv:2412.05496) takes a block mask, a list of the attended blocks, and skips all others.

Shape letters as in `models/gpt2.py`.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gpt2_accel import kernels

# cuDNN before 9.15.1 computes wrong values for other lengths (pytorch/pytorch#169849).
CUDNN_LENGTHS = 128
# Up to this length attention in fp32 takes a CPU 0.5 to 0.8 of the time of bf16, casts included.
SHORT = 128
NARROWEST = 16  # channels of a head, for FlexAttention


def preferred(q: torch.Tensor, causal: bool) -> AbstractContextManager:
    """Returns a context in which torch prefers the attention kernels of `sdpa_order`.

    q: queries, (B, H, T, D). On a CPU autocast does not change their dtype, see `in_fp32`. cuDNN's
    kernel is only for causal attention of some lengths: with masks it plans again for each length.
    """
    order = kernels.choices.sdpa_order
    if q.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    if not causal or q.shape[2] % CUDNN_LENGTHS:
        order = tuple(name for name in order if name != "CUDNN_ATTENTION")
    if not (kernels.choices.enabled and order):
        return nullcontext()
    return sdpa_kernel([getattr(SDPBackend, name) for name in order], set_priority=True)


def in_fp32(q: torch.Tensor) -> bool:
    """Whether attention is faster in fp32: for short bf16 queries q: (B, H, T, D) on a CPU."""
    short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < q.shape[2] <= SHORT
    return short and kernels.choices.enabled


def takes_groups(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel takes fewer heads of keys and values than of queries, q: (B, H, T, D).

    On a GPU only flash attention and cuDNN's do. Torch's plain attention would store the scores,
    (B, H, T, T).
    """
    if q.device.type != "cuda":
        return True
    flash = "FLASH_ATTENTION" in kernels.choices.sdpa_order
    return flash and mask is None and q.dtype in (torch.float16, torch.bfloat16)


def document_blocks(documents: torch.Tensor) -> BlockMask:
    """Returns the causal mask that does not cross document boundaries.

    documents: (B, T), the number of each token's document.
    """
    B, T = documents.shape

    def attended(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return create_block_mask(attended, B, None, T, T, documents.device)


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    """Returns softmax(q · k / sqrt(D)) · v under the mask.

    q, k, v and the result: (B, H, T, D); keys and values may have fewer heads.
    """
    on_cpu = q.device.type == "cpu"  # there only the tests use it
    flex = flex_attention if on_cpu or torch.compiler.is_compiling() else compiled_attention()
    return flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def compiled_attention() -> Any:
    """Returns FlexAttention compiled for an uncompiled model: uncompiled it computes all scores."""
    return torch.compile(flex_attention, dynamic=False)
