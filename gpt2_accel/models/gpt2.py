"""GPT-2 as one readable `nn.Module`: config, initialisation and forward, in plain PyTorch.

The architecture of "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019) as
OpenAI released it: pre-LayerNorm blocks, tanh-approximated GELU, learned positions, the output head
tied to the token embedding. Names follow Hugging Face's GPT-2, so conversion (`hf/gpt2.py`) is four
transposes per block.

`parts.py` calls the faster attention and loss of `kernels/`, next to the plain PyTorch that they
replace. `GPT2_ACCEL_KERNELS=off` turns them off.

Shape letters: B batch, T sequence, C n_embd, H n_head, D = C / H, V vocabulary (padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from gpt2_accel.config import TrainConfig, check_ranges
from gpt2_accel.models import LanguageModel, ModelConfig, layers_heads_width
from gpt2_accel.models.parts import Embedding, Mask, attend


@dataclass
class GPTConfig(ModelConfig):
    """The shape of a GPT-2; the defaults are the 124M model. Fields are named as in `config.json`.

    `dropout` is the rate of the embedding, attention and residual dropouts. `bias=False` removes
    the biases of all Linear and LayerNorm modules (nanoGPT's option). `gelu` is `tanh`, GPT-2's
    approximation, or `none`, the exact function, which nanoGPT uses.

    Raises `ValueError` if a size is not positive, `n_embd` is not divisible by `n_head`, or
    `dropout` is not in [0, 1).
    """

    architecture = "gpt2"

    vocab_size: int = 50257
    n_positions: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True
    dropout: float = 0.0
    gelu: str = "tanh"

    def __post_init__(self) -> None:
        check_ranges(
            self, positive="vocab_size n_positions n_layer n_head n_embd", below_one="dropout"
        )
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd ({self.n_embd}) is not divisible by n_head ({self.n_head}): "
                "choose n_embd as a multiple of n_head"
            )
        self.n_kv_head = self.n_head
        self.head_dim = self.n_embd // self.n_head

    @classmethod
    def from_settings(cls, settings: TrainConfig, vocab_size: int) -> "GPTConfig":
        """Returns the shape that a `TrainConfig` describes."""
        return cls(
            vocab_size,
            settings.n_positions,
            *layers_heads_width(settings),
            bias=settings.bias,
            dropout=settings.dropout,
        )

    def build(self) -> "GPT":
        return GPT(self)


CONFIG = GPTConfig


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in the dtype of its input, also if FSDP2 gathers its weights in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, C) -> (…, C)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class StackedLinear(nn.Linear):
    """A projection whose weight stacks q, k and v along its rows. Muon updates each separately."""

    stacked = 3


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_attn = StackedLinear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(
        self, x: torch.Tensor, mask: Mask | None = None, past: Any | None = None
    ) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C).

        `mask` is a `BlockMask`, or (B, 1, T, keys) bool, True where attended. None is the causal
        mask. `past` holds the keys and values of the tokens before.
        """
        B, T, C = x.shape
        stacked = self.c_attn(x).split(C, dim=2)
        # Each (B, H, T, D).
        q, k, v = [part.view(B, T, self.n_head, -1).transpose(1, 2) for part in stacked]
        if past is not None:
            k, v = past.update(k, v)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, mask, dropout)  # (B, H, T, D)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Linear to four times the width, GELU (tanh-approximated in GPT-2), Linear back."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout
        self.gelu = config.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        x = F.gelu(self.c_fc(x), approximate=self.gelu)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """A transformer layer: attention, then MLP, each pre-normalised, with a residual connection."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, mask: Mask | None = None, past: Any | None = None
    ) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C); `mask` and `past` as in the attention."""
        x = x + self.attn(self.ln_1(x), mask, past)
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """A GPT-2 language model. The head is tied to the token embedding `wte`."""

    config_class = GPTConfig
    residual = ("c_proj",)

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, bias=config.bias)
        self.init_weights()

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Mask | None,
        cache: Sequence[Any] | None,
    ) -> torch.Tensor:
        x = self.wte(input_ids) + self.wpe(position_ids)  # (B, T, C)
        x = F.dropout(self.residual_stream(x), self.config.dropout, self.training)
        return self.ln_f(self.run_blocks(self.h, x, attention_mask, cache=cache))

    @property
    def head_weight(self) -> torch.Tensor:
        return self.wte.weight
