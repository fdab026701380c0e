"""Llama as one readable `nn.Module`: config, initialisation and forward, in plain PyTorch.

The architecture of "LLaMA: Open and Efficient Foundation Language Models" (Touvron et al., 2023,
arXiv:2302.13971) as in Hugging Face's `LlamaForCausalLM`, which SmolLM2 and TinyLlama use:
pre-RMSNorm blocks, rotary positions, grouped-query attention, SwiGLU, no biases, an output head
that may be tied to the token embedding. Names are Hugging Face's below `model.`, so conversion
changes nothing but vocabulary padding.

Shape letters: B batch, T sequence, C n_embd, H n_head, K n_kv_head, D head_dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn

from gpt2_accel.config import TrainConfig, check_ranges
from gpt2_accel.models import LanguageModel, ModelConfig, layers_heads_width
from gpt2_accel.models.parts import (
    Embedding,
    Mask,
    RMSNorm,
    SwiGLU,
    attend,
    rotary_angles,
    rotate,
)
from gpt2_accel.rounding import ceil_div, round_up


@dataclass
class LlamaConfig(ModelConfig):
    """The shape of a Llama; the defaults give SmolLM2-135M. Sizes are named as in `GPTConfig`.

    `n_kv_head` heads of keys and values serve `n_head` heads of queries. `head_dim` does not depend
    on the width `n_embd`. `n_inner` is the width of the MLP, `rope_theta` the base of the rotary
    frequencies, `norm_eps` RMSNorm's epsilon. `tied` makes the token embedding the output head too.

    Raises `ValueError` if a size, `rope_theta` or `norm_eps` is not positive, `n_head` is not a
    multiple of `n_kv_head`, or `head_dim` is odd.
    """

    architecture = "llama"
    dropout = 0.0  # Llama has none
    depth_head: ClassVar[int] = 64  # channels of a head that `depth` gives
    # Proportions of a new model, here SmolLM2-135M's and -360M's. The 8/3 are from the Llama paper,
    # section 2.2.
    group: ClassVar[int] = 3  # heads of queries for each of keys and values
    inner_thirds: ClassVar[int] = 8  # the MLP's width, in thirds of `n_embd`
    inner_multiple: ClassVar[int] = 64  # the width is rounded up to a multiple

    vocab_size: int = 49152
    n_positions: int = 8192
    n_layer: int = 30
    n_head: int = 9
    n_kv_head: int = 3
    head_dim: int = 64
    n_embd: int = 576
    n_inner: int = 1536
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = "vocab_size n_positions n_layer n_head n_kv_head head_dim n_embd n_inner"
        check_ranges(self, positive=sizes, above_zero="rope_theta norm_eps soft_cap")
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head ({self.n_head}) is not a multiple of n_kv_head ({self.n_kv_head}): "
                "choose a multiple"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) is odd, but rotary positions turn pairs of channels: "
                "choose an even number"
            )

    @classmethod
    def from_settings(cls, settings: TrainConfig, vocab_size: int) -> "LlamaConfig":
        """Returns the shape that a `TrainConfig` describes, with a tied head.

        Layers, heads and width come from `layers_heads_width`. The rotary base is 10,000 (Su et
        al., 2021, arXiv:2104.09864), for contexts of a few thousand tokens; published models have
        larger ones for longer contexts. If `group` does not divide the heads, there are as many
        heads of keys and values as of queries.

        Raises `ValueError` if the heads do not divide the width, and for dropout, which the
        architecture does not have.
        """
        cls.check_dropout(settings.dropout)
        n_layer, n_head, n_embd = layers_heads_width(settings, cls.depth_head)
        if n_embd % n_head:
            raise ValueError(
                f"n_embd ({n_embd}) is not divisible by n_head ({n_head}): "
                "choose n_embd as a multiple of n_head"
            )
        return cls(
            vocab_size,
            settings.n_positions,
            n_layer,
            n_head,
            n_kv_head=n_head if n_head % cls.group else n_head // cls.group,
            head_dim=n_embd // n_head,
            n_embd=n_embd,
            n_inner=round_up(ceil_div(cls.inner_thirds * n_embd, 3), cls.inner_multiple),
            rope_theta=10_000.0,
        )

    @classmethod
    def check_dropout(cls, dropout: float) -> None:
        """Raises `ValueError` if `dropout` is not 0."""
        if dropout:
            raise ValueError(f"{cls.architecture} has no dropout: give --dropout 0")

    def norm(self) -> nn.Module:
        """Builds a norm of the residual stream, (…, C)."""
        return RMSNorm(self.n_embd, self.norm_eps)

    def build(self) -> "Llama":
        return Llama(self)


CONFIG = LlamaConfig


class Attention(nn.Module):
    """Grouped-query causal self-attention (Ainslie et al., 2023, arXiv:2305.13245)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.config = config
        self.q_proj = nn.Linear(C, config.n_head * D, bias=False)
        self.k_proj = nn.Linear(C, config.n_kv_head * D, bias=False)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, bias=False)
        self.o_proj = nn.Linear(config.n_head * D, C, bias=False)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: (B, T, C) -> queries (B, T, H, D), keys and values (B, T, K, D), not yet rotated."""
        B, T, _ = x.shape
        split = (B, T, -1, self.config.head_dim)
        return self.q_proj(x).view(split), self.k_proj(x).view(split), self.v_proj(x).view(split)

    def positioned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turns queries or keys, (B, heads, T, D), by their positions' angles."""
        return rotate(x, cos, sin)

    def forward(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        mask: Mask | None = None,
        past: Any | None = None,
    ) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C). `angles`: from `rotary_angles`.

        `mask` is a `BlockMask`, or (B, 1, T, keys) bool, True where attended. None is the causal
        mask. `past` holds the keys and values of the tokens before.
        """
        B, T, _ = x.shape
        q, k, v = self.heads(x)
        q = self.positioned(q.transpose(1, 2), *angles)  # (B, H, T, D)
        k = self.positioned(k.transpose(1, 2), *angles)  # (B, K, T, D)
        v = v.transpose(1, 2)
        if past is not None:
            k, v = past.update(k, v)
        y = attend(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    """A transformer layer: attention, then MLP, each pre-normalised, with a residual connection."""

    def __init__(self, config: LlamaConfig, attention: type[Attention], mlp: type[nn.Module]):
        super().__init__()
        self.input_layernorm = config.norm()
        self.self_attn = attention(config)
        self.post_attention_layernorm = config.norm()
        self.mlp = mlp(config.n_embd, config.n_inner)

    def forward(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        mask: Mask | None = None,
        past: Any | None = None,
    ) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C); the other arguments as in the attention."""
        x = x + self.self_attn(self.input_layernorm(x), angles, mask, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(LanguageModel):
    """A Llama language model. A subclass may have another `attention` or `mlp`."""

    config: LlamaConfig
    config_class = LlamaConfig
    attention: type[Attention] = Attention
    mlp: type[nn.Module] = SwiGLU
    residual = ("o_proj", "down_proj")

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.embed_tokens = Embedding(config.padded_vocab_size, config.n_embd)
        self.layers = nn.ModuleList(
            Block(config, self.attention, self.mlp) for _ in range(config.n_layer)
        )
        self.norm = config.norm()
        if not config.tied:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.init_weights()
        with torch.no_grad():
            self.embed_tokens.weight[config.vocab_size :] = 0

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the input of the first block: (B, T) -> (B, T, C)."""
        return self.residual_stream(self.embed_tokens(input_ids))

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Mask | None,
        cache: Sequence[Any] | None,
    ) -> torch.Tensor:
        x = self.embed(input_ids)  # (B, T, C)
        config = self.config
        angles = rotary_angles(position_ids, config.head_dim, config.rope_theta, x.dtype)
        return self.norm(self.run_blocks(self.layers, x, angles, attention_mask, cache=cache))

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embed_tokens.weight if self.config.tied else self.lm_head.weight
