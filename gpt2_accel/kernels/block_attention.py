"""Attention within documents on a GPU: FlexAttention (Dong et al., 2024, arXiv:2412.05496) with a block mask.

A dense mask, (B, 1, T, T), excludes flash attention. The block mask lists the blocks that are attended; all others are
skipped. Shape letters as in `models/gpt2.py`; a row has n = ceil(T / BLOCK) blocks.
"""

import functools

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gpt2_accel import kernels

BLOCK = 128  # tokens; FlexAttention's default
NARROWEST = 16  # channels of a head


def applies(width: int, dropout: float = 0.0) -> bool:
    """Whether to use block masks for heads of `width` channels: if `kernels.choices.block_masks` is set, without dropout."""
    return (
        kernels.choices.enabled
        and kernels.choices.block_masks
        and width >= NARROWEST
        and not dropout
    )


def document_blocks(documents: torch.Tensor) -> BlockMask:
    """Returns the causal mask that does not cross document boundaries.

    documents: (B, T), the number of each token's document, which never falls along a row. Computed from the first and
    the last document of each block, without a (B, T, T) mask and without a wait for the device.
    """
    T = documents.shape[1]
    first = documents[:, ::BLOCK]  # (B, n)
    n = first.shape[1]
    last = torch.cat((documents[:, BLOCK - 1 : (n - 1) * BLOCK : BLOCK], documents[:, -1:]), dim=1)
    number = torch.arange(n, device=documents.device)
    earlier = number[:, None] > number[None, :]  # (n, n): queries x keys
    # Documents are in order, so an earlier block shares a document if its last one is the first one here.
    some = earlier & (last[:, None, :] >= first[:, :, None])  # (B, n, n)
    full = earlier & (first[:, None, :] == last[:, :, None])
    some = some | (number[:, None] == number[None, :])

    def attended(b, h, q, k):
        return (q >= k) & (documents[b, q] == documents[b, k])

    return BlockMask.from_kv_blocks(
        *ordered(some & ~full),
        *ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=attended,
        seq_lengths=(T, T),
    )


def ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks: (B, n, n) bool -> the number of True per row, (B, 1, n), and their columns first, (B, 1, n, n), int32."""
    blocks = blocks[:, None].to(torch.int32)
    columns = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1).to(torch.int32), columns.to(torch.int32)


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    """Returns softmax(q · k / sqrt(D)) · v under the mask. q, k, v and the result: (B, H, T, D); keys and
    values may have fewer heads."""
    on_cpu = q.device.type == "cpu"  # there only the tests use it
    flex = flex_attention if on_cpu or torch.compiler.is_compiling() else compiled_attention()
    return flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def compiled_attention():
    """Returns FlexAttention compiled for an uncompiled model: uncompiled it computes all scores."""
    return torch.compile(flex_attention, dynamic=False)
