"""The parts that architectures share: embedding, norms, positions, attention, masks, the loss.

Shape letters: B batch, T sequence, C width, H heads, D channels of a head, V vocabulary (padded).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from gpt2_accel import kernels
from gpt2_accel.kernels import attention, cross_entropy

Mask = torch.Tensor | BlockMask


class Embedding(nn.Embedding):
    """`torch.nn.Embedding`, not initialized on the meta device: torch would import its compiler."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def rms_norm(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang, Sennrich, 2019,
    arXiv:1910.07467).

    x: (…, size), weight: (size,) -> (…, size), in the dtype of x, also if autocast uses fp32.
    """
    return F.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """`rms_norm` with a weight."""

    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, size) -> the same, in its dtype, also if FSDP2 gathers the weight in bf16."""
        return rms_norm(x, self.eps, self.weight.to(x.dtype))


def rotary_angles(
    position_ids: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines of rotary positions (Su et al., 2021, arXiv:2104.09864).

    position_ids: (T,) or (B, T) -> two of (1 or B, 1, T, D) in `dtype`, computed in fp32. Channels
    i and i + D/2 are a pair that turns by theta^(-2i/D) per position.
    """
    steps = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (steps / head_dim)  # (D/2,)
    angles = position_ids[..., None].float() * frequencies  # (…, T, D/2)
    angles = torch.cat((angles, angles), dim=-1).view(-1, 1, position_ids.shape[-1], head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates queries or keys by the angles of their positions. x: (B, H, T, D) -> the same, in the
    dtype of x."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class SwiGLU(nn.Module):
    """The MLP of Shazeer, 2020, arXiv:2002.05202: down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, dropout: float = 0.0
) -> torch.Tensor:
    """Returns softmax(q · k / sqrt(D)) · v.

    q: (B, H, T, D); k, v: (B, H or fewer, T, D) -> (B, H, T, D). `mask` is a `BlockMask`, or
    (B, 1, T, T) bool, True where attended. None is the causal mask; a single query attends to all
    keys.
    """
    if isinstance(mask, BlockMask):
        return attention.block_attention(q, k, v, mask)
    causal = mask is None
    if q.shape[2] == 1:  # torch's causal mask would leave it the first key only
        causal = False
    groups = q.shape[1] // k.shape[1]
    # Not `groups > 1`: torch 2.11 breaks the graph if a comparison of dynamic sizes is an argument.
    grouped = False
    if groups > 1:
        grouped = attention.takes_groups(q, mask)
        if not grouped:
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
    dtype = q.dtype
    if attention.in_fp32(q):
        q, k, v = q.float(), k.float(), v.float()
    with attention.preferred(q, causal):
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
        )
    return y.to(dtype)


def sequence_positions(input_ids: torch.Tensor, n_positions: int) -> torch.Tensor:
    """Returns the positions of a sequence's tokens: (B, T) -> (T,) int64.

    Raises `ValueError` if T exceeds `n_positions`.
    """
    T = input_ids.shape[1]
    if T > n_positions:
        raise ValueError(
            f"a sequence of {T} tokens is longer than n_positions ({n_positions}): "
            "shorten it, or use a model with more positions"
        )
    return torch.arange(T, device=input_ids.device)


def document_positions(documents: torch.Tensor, n_positions: int) -> torch.Tensor:
    """Returns the position of each token in its document, (B, T) int64.

    documents: (B, T), the number of each token's document, which never falls along a row. Raises
    `ValueError` if T exceeds `n_positions`.
    """
    place = sequence_positions(documents, n_positions)
    begins = torch.zeros_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(begins, place, 0).cummax(dim=1).values


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Returns the causal mask that does not cross document boundaries.

    documents: (B, T), the number of each token's document -> (B, 1, T, T) bool, True where
    attended.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def head_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    reduction: str = "mean",
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Returns the cross-entropy of the logits in nats, 0 at targets of -100.

    x: (B, T, C), weight: (V, C), targets: (B, T) -> the mean, a scalar, NaN without a target, or
    (B, T) with `reduction` "none". `soft_cap` limits the logits, see `cross_entropy.capped`.
    """
    x = x.flatten(0, 1)
    flat = targets.flatten()
    counts = flat != -100
    # In chat most targets are ignored. A GPU would have to wait for their number, and there is none
    # while the compiler or a `FakeTensorMode` traces.
    traced = torch.compiler.is_compiling() or type(counts) is not torch.Tensor
    chosen = counts.device.type == "cpu" and not traced and not counts.all()
    if chosen:
        x = x[counts]
        flat = flat[counts]
    chunked = kernels.choices.enabled and len(x) * len(weight) > cross_entropy.LOGITS_AT_ONCE
    compute = cross_entropy.linear_cross_entropy if chunked else cross_entropy.plain_cross_entropy
    loss = compute(x, weight, flat, vocab_size, reduction, soft_cap)
    if reduction != "none":
        return loss
    if chosen:
        loss = loss.new_zeros(counts.shape).masked_scatter(counts, loss)
    return loss.view_as(targets)


def logits_loss(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """Returns the cross-entropy of logits, in fp32, or in fp64 if they are.

    logits: (B·T, V) or (B, T, V), targets: (B·T,) or (B, T). `reduction` as in `head_loss`.
    """
    wide = cross_entropy.at_least_fp32(logits.flatten(0, -2))
    loss = F.cross_entropy(wide, targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss
