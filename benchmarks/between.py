"""The models between GPT-2 and Qwen3: GPT-2 with the first few of Qwen3's changes.

They exist only for `architectures.py`, which measures what each change brings. Without changes the model is
`models/gpt2.py`'s, with all of them `models/qwen3.py`'s with as many key-value heads as heads.

Shape letters: B batch, T sequence, C width, H heads, D = C / H, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt2_accel.kernels.rotary import rotary_angles
from gpt2_accel.models.parts import (
    RMSNorm,
    head_loss,
    rotate,
    sequence_positions,
)

CHANGES = ("rotary positions", "RMSNorm", "normalized queries and keys", "SwiGLU", "no biases")
ROPE_THETA, NORM_EPS = 10_000.0, 1e-6


@dataclass(frozen=True)
class BetweenConfig:
    """The shape, and the number of `CHANGES` made."""

    vocab_size: int
    n_positions: int
    n_layer: int
    n_head: int
    n_embd: int
    changes: int = 0

    def has(self, change: str) -> bool:
        """Whether the model has this change."""
        return CHANGES.index(change) < self.changes

    @property
    def n_inner(self) -> int:
        """Width of the MLP. SwiGLU has three matrices instead of two: two thirds of the width, rounded to 8, give as
        many parameters."""
        wide = 4 * self.n_embd
        return round(wide * 2 / 3 / 8) * 8 if self.has("SwiGLU") else wide

    def norm(self) -> nn.Module:
        """Builds a normalization of the residual stream."""
        if self.has("RMSNorm"):
            return RMSNorm(self.n_embd, NORM_EPS)
        return nn.LayerNorm(self.n_embd)

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """Builds a linear layer."""
        return nn.Linear(inputs, outputs, bias=not self.has("no biases"))


class Block(nn.Module):
    """One transformer layer: attention, then MLP, each pre-normalized, with a residual connection."""

    def __init__(self, config: BetweenConfig):
        super().__init__()
        C, D = config.n_embd, config.n_embd // config.n_head
        self.config = config
        self.ln_1, self.ln_2 = config.norm(), config.norm()
        self.c_attn, self.c_proj = config.linear(C, 3 * C), config.linear(C, C)
        self.c_attn.stacked = 3  # q, k and v
        if config.has("normalized queries and keys"):
            self.q_norm, self.k_norm = RMSNorm(D, NORM_EPS), RMSNorm(D, NORM_EPS)
        if config.has("SwiGLU"):
            self.gate = config.linear(C, config.n_inner)
        self.up, self.down = config.linear(C, config.n_inner), config.linear(config.n_inner, C)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.ln_1(x), angles)
        y = self.ln_2(x)
        if self.config.has("SwiGLU"):
            return x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x + self.down(F.gelu(self.up(y), approximate="tanh"))

    def attention(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Causal self-attention: x (B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = (p.view(B, T, self.config.n_head, -1) for p in self.c_attn(x).split(C, dim=2))
        if self.config.has("normalized queries and keys"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.config.has("rotary positions"):
            q, k = rotate(q, *angles), rotate(k, *angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Between(nn.Module):
    """A language model between GPT-2 and Qwen3, with a tied head."""

    def __init__(self, config: BetweenConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if not config.has("rotary positions"):
            self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = config.norm()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initializes weights as GPT-2 and Qwen3 do: N(0, 0.02), scaled by 1/sqrt(2·n_layer) for projections onto the
        residual stream, biases zero."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                is_residual = name.endswith(("c_proj", "down"))
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if is_residual else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def head_weight(self) -> torch.Tensor:
        """The matrix of the output head, (V, C)."""
        return self.wte.weight

    def forward(
        self, input_ids: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        """Returns the loss; arguments as in `GPT.forward`."""
        config = self.config
        positions = sequence_positions(input_ids, config.n_positions)
        x = self.wte(input_ids)
        if not config.has("rotary positions"):
            x = x + self.wpe(positions)
        angles = rotary_angles(positions, config.n_embd // config.n_head, ROPE_THETA)
        for block in self.h:
            x = block(x, angles)
        return head_loss(self.ln_f(x), self.wte.weight, targets, config.vocab_size, reduction)
