"""What the architectures share: embeddings, positions, the document mask, the logits and the loss.

Shape letters: B batch, T sequence, C width, V vocabulary (padded).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from gpt2_accel.kernels import cross_entropy
from gpt2_accel.kernels.block_attention import document_blocks
from gpt2_accel.kernels.linear import linear

Mask = torch.Tensor | BlockMask


class Embedding(nn.Embedding):
    """`torch.nn.Embedding`, not initialized on the meta device, where torch would import its compiler for that."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def sequence_positions(input_ids: torch.Tensor, n_positions: int) -> torch.Tensor:
    """Returns the positions of a sequence's tokens: input_ids (B, T) -> (T,) int64. Raises `ValueError` if T exceeds
    `n_positions`."""
    T = input_ids.shape[1]
    if T > n_positions:
        raise ValueError(
            f"a sequence of {T} tokens is longer than n_positions ({n_positions}): "
            "shorten it, or use a model with more positions"
        )
    return torch.arange(T, device=input_ids.device)


def document_mask(input_ids: torch.Tensor, separator: int, blocks: bool = False) -> Mask:
    """Returns the causal mask that does not cross document boundaries; `separator` starts each document.

    input_ids: (B, T) -> (B, 1, T, T) bool, True where attended, or with `blocks` a mask for `block_attention`.
    """
    documents = (input_ids == separator).cumsum(dim=1)
    if blocks:
        return document_blocks(documents)
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def head_logits(x: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns the logits without vocabulary padding. x: (…, C), weight: (V, C) -> (…, vocab_size)."""
    return linear(x, weight[:vocab_size])


def head_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    reduction: str = "mean",
) -> torch.Tensor:
    """Returns the cross-entropy of the logits in nats, 0 at targets of -100.

    x: (B, T, C), weight: (V, C), targets: (B, T) -> the mean, a scalar, or with `reduction` "none" (B, T).
    """
    x, flat = x.flatten(0, 1), targets.flatten()
    if cross_entropy.applies(x, weight):
        loss = cross_entropy.linear_cross_entropy(
            x, weight, flat, vocab_size=vocab_size, reduction=reduction
        )
    else:
        # The product includes the padding rows, which is the faster shape. A bias of -inf takes them out of the
        # softmax without another copy of the logits.
        bias = x.new_zeros(len(weight))
        bias[vocab_size:] = -math.inf
        loss = F.cross_entropy(F.linear(x, weight, bias), flat, reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss
