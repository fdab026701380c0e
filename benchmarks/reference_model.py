"""A textbook GPT-2: each formula written by hand, with switches for PyTorch's own operations.

The weights have the names and shapes of `gpt2_accel.models.gpt2.GPT`, and the logits are equal. The
loss uses all logits at once.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpt2_accel.models.gpt2 import GPT, MLP, CausalSelfAttention, GPTConfig


class HandLayerNorm(nn.Module):
    """LayerNorm over the last dimension, written as separate operations."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., width) -> the same shape."""
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        x = self.weight * (x - mean) / torch.sqrt(variance + 1e-5)
        return x if self.bias is None else x + self.bias


def hand_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes GELU with the tanh approximation (Hendrycks & Gimpel, 2016, section 2), as GPT-2."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class HandMLP(MLP):
    """The MLP with `hand_gelu`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        return self.c_proj(hand_gelu(self.c_fc(x)))


def standard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes causal attention with all attention weights, (B, H, T, T), in memory.

    q, k, v: (B, H, T, D) -> (B, H, T, D). `seen`, (T, T), is nonzero at attended positions; None
    builds the causal mask.
    """
    T = q.shape[-2]
    if seen is None:
        seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(seen == 0, -math.inf).softmax(dim=-1) @ v


class HandAttention(CausalSelfAttention):
    """Attention by `standard_attention`; with `stored_mask` each layer stores a (T, T) mask."""

    def __init__(self, config: GPTConfig, stored_mask: bool):
        super().__init__(config)
        T = config.n_positions
        seen = torch.ones(T, T).tril() if stored_mask else None
        self.register_buffer("seen", seen, persistent=False)

    def forward(self, x: torch.Tensor, mask: None = None, cache: None = None) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C); always causal, ignores `mask` and `cache`."""
        B, T, C = x.shape
        heads = []
        for part in self.c_attn(x).split(C, dim=2):
            heads.append(part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2))
        q, k, v = heads  # (B, H, T, C/H)
        seen = None if self.seen is None else self.seen[:T, :T]
        y = standard_attention(q, k, v, seen)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


def slow_gpt(config: GPTConfig, *, stored_mask: bool = True, hand_norm_gelu: bool = True) -> GPT:
    """Builds a `GPT` without dropout, with hand-written attention and, if `hand_norm_gelu`,
    LayerNorm and GELU. With the same random state its initial weights equal those of `GPT(config)`.
    """
    model = GPT(config)
    weights = model.state_dict()
    for block in model.h:
        block.attn = HandAttention(config, stored_mask)
        if hand_norm_gelu:
            block.mlp = HandMLP(config)
            block.ln_1 = HandLayerNorm(config.n_embd, config.bias)
            block.ln_2 = HandLayerNorm(config.n_embd, config.bias)
    if hand_norm_gelu:
        model.ln_f = HandLayerNorm(config.n_embd, config.bias)
    model.load_state_dict(weights)
    return model


class PlainLoss(nn.Module):
    """A wrapper that returns the loss of a model, from the logits of all positions at once."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """input_ids, targets: (B, T) -> the mean cross-entropy in nats."""
        logits = self.model(input_ids)  # (B, T, vocab_size)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
