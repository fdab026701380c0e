"""GPT-2 as one readable `nn.Module`: config, initialisation and forward, in plain PyTorch.

The architecture is that of "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019) as OpenAI
released it: pre-LayerNorm blocks, tanh-approximated GELU, learned positions, the output head tied to the token
embedding. Names follow Hugging Face's GPT-2, so that conversion (`hf/convert.py`) is four transposes per block.

`kernels/` computes the same faster on some devices; each call stands beside the plain PyTorch that it replaces.
`GPT2_ACCEL_KERNELS=off` turns the kernels off.

Shape letters: B batch, T sequence, C n_embd, H n_head, D = C / H, V vocabulary (padded), S cached positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gpt2_accel.config import check_ranges
from gpt2_accel.kernels import attention, cross_entropy, gelu
from gpt2_accel.kernels.linear import Linear, linear
from gpt2_accel.models import LayerCache

# n_layer, n_head, n_embd of the four released models, by their Hub name.
SIZES: dict[str, tuple[int, int, int]] = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


@dataclass
class GPTConfig:
    """Shape of a GPT-2; the defaults are the 124M model. Field names are those of HF's `config.json`.

    `dropout` is the one rate of the embedding, attention and residual dropouts. `bias=False` leaves
    out the biases of all Linear and LayerNorm modules (nanoGPT's option). `gelu` is `tanh`, GPT-2's
    approximation, or `none`, the exact function, which nanoGPT's models are trained with.

    Raises `ValueError` if a size is not positive, `n_embd` is not divisible by `n_head`, `dropout` is
    not in [0, 1), or `gelu` is neither.
    """

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
        if self.gelu not in ("tanh", "none"):
            raise ValueError(f"gelu must be 'tanh' or 'none', got {self.gelu!r}")

    @classmethod
    def from_settings(cls, settings: object, vocab_size: int) -> "GPTConfig":
        """The shape that the settings of a run, a `TrainConfig`, ask for."""
        names = ("n_positions", "n_layer", "n_head", "n_embd", "bias", "dropout")
        return cls(vocab_size, **{name: getattr(settings, name) for name in names})

    @classmethod
    def from_name(cls, name: str, **overrides) -> "GPTConfig":
        """The config of a released size (`gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`)."""
        if name not in SIZES:
            raise ValueError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}")
        n_layer, n_head, n_embd = SIZES[name]
        return cls(**{"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, **overrides})

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size` rounded up to a multiple of 128, which matrix units like (50257 -> 50304)."""
        return -(-self.vocab_size // 128) * 128

    @property
    def parameter_count(self) -> int:
        """Parameters of the model as saved: the tied head counts once, the vocabulary's padding rows not at all."""
        C, bias = self.n_embd, int(self.bias)
        norm = C * (1 + bias)
        attention = 3 * C * (C + bias) + C * (C + bias)
        mlp = 4 * C * (C + bias) + C * (4 * C + bias)
        block = 2 * norm + attention + mlp
        return (self.vocab_size + self.n_positions) * C + self.n_layer * block + norm

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied by: all but the position embeddings, as nanoGPT counts them."""
        return self.parameter_count - self.n_positions * self.n_embd

    @property
    def attention_width(self) -> int:
        """L·H·Q: layers x heads x channels of a head."""
        return self.n_layer * self.n_embd

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads, and channels of a head, of the keys and values that generation keeps."""
        return self.n_layer, self.n_head, self.n_embd // self.n_head

    def build(self) -> "GPT":
        """A model of this shape with fresh weights."""
        return GPT(self)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in the dtype of its input, also where FSDP2 gathers its weights in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, C) -> (…, C)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each position sees itself and the positions before it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_attn.stacked = 3  # q, k and v
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C). `mask`, (B, 1, T, T) bool, is True where a position sees another, itself
        included; without one it sees all up to itself. With a `cache` the T positions follow those in it, and a
        mask is (B, 1, T, S)."""
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
            for part in self.c_attn(x).split(C, dim=2)
        )
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)
        dropout = self.dropout if self.training else 0.0
        if attention.applies(q, mask, dropout):
            y = attention.causal_attention(q, k, v)
        else:
            causal = mask is None and T > 1
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal
            )
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two Linear layers, four times as wide in between, with GELU, tanh-approximated in GPT-2."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout
        self.gelu = config.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        x = self.c_fc(x)
        x = gelu.tanh_gelu(x) if gelu.applies(x, self.gelu) else F.gelu(x, approximate=self.gelu)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer: attention, then MLP, each normalised before and added to its input."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C); `mask` and `cache` as in the attention."""
        x = x + self.attn(self.ln_1(x), mask, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


def document_mask(input_ids: torch.Tensor, separator: int) -> torch.Tensor:
    """Attention mask in which a position sees those up to itself in its own document, which `separator` begins.

    input_ids: (B, T) -> (B, 1, T, T) bool, a row per position, True where it sees another.
    """
    documents = (input_ids == separator).cumsum(dim=1)
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


class GPT(nn.Module):
    """A GPT-2 language model. The head has no weight of its own: it is `wte`, tied.

    `wte` has `config.padded_vocab_size` rows. The pad rows start at zero, never get a gradient, and
    reach neither the loss, nor the logits that `forward` returns, nor a saved file.

    `separator` is the token that each document begins with, where attention is not to cross from one
    document to the next; None, as in GPT-2, lets it cross. With `checkpoint_activations` the forward keeps
    only the input of each block, from which the backward runs it again (Chen et al., 2016, arXiv:1604.06174).
    """

    separator: int | None = None
    checkpoint_activations = False

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, bias=config.bias)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """N(0, 0.02) and zero biases; projections onto the residual stream scaled by 1/sqrt(2·n_layer).

        Source: the GPT-2 paper, section 2.3, and OpenAI's released code for the 0.02.
        """
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                is_residual = name.endswith("c_proj")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if is_residual else 0.02
                nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        self.wte.weight[self.config.vocab_size :] = 0

    def forward(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        reduction: str = "mean",
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        """Logits, or with `targets` the loss.

        input_ids: (B, T) integers below `vocab_size`. targets: (B, T), the token that follows each
        position (already shifted, unlike HF's `labels`), -100 where there is nothing to predict.
        Returns the logits (B, T, vocab_size), or the mean cross-entropy in nats per target, a scalar:
        in training the logits stay inside, since Accelerate would copy what leaves a mixed-precision
        forward to fp32. With `reduction` "none" the loss is that of each target, (B, T), 0 at -100.

        Several texts can share a row: position_ids, (B, T) below `n_positions`, then say where in its
        text each token stands, and attention_mask, (B, 1, T, T) bool, which tokens it sees, itself
        included. `logits_to_keep` returns the logits of the last so many positions; 0 those of all.

        Raises `ValueError` if T exceeds `n_positions` and there are no `position_ids`.
        """
        x = self.hidden(input_ids, position_ids, attention_mask)
        x = self.ln_f(x[:, -logits_to_keep:])
        return self.logits(x) if targets is None else self.loss(x, targets, reduction)

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> torch.Tensor:
        """What the last block returns, (B, T, C), before the final LayerNorm. Arguments as in `forward`; with a
        `cache`, one of each block, the tokens follow those in it."""
        T = input_ids.shape[1]
        if position_ids is None:
            if T > self.config.n_positions:
                raise ValueError(
                    f"a sequence of {T} tokens is longer than n_positions ({self.config.n_positions}): "
                    "shorten it, or use a model with more positions"
                )
            position_ids = torch.arange(T, device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(position_ids)  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # the residual stream, also where FSDP2 gathers the embeddings in bf16
        x = F.dropout(x, self.config.dropout, self.training)
        if attention_mask is None and self.separator is not None and cache is None:
            attention_mask = document_mask(input_ids, self.separator)
        for i, block in enumerate(self.h):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, attention_mask, use_reentrant=False)
            else:
                x = block(x, attention_mask, None if cache is None else cache[i])
        return x

    def decode(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Reads further tokens into a cache and returns the logits of what follows the last, (B, vocab_size).

        input_ids: (B, T); position_ids: (B or 1, T); attention_mask: (B, 1, T, S) bool, or None where the rows have
        no padding and either T is 1 or the cache was empty. It runs in the dtype of the weights, since autocast
        wraps `forward` alone.
        """
        x = self.hidden(input_ids, position_ids, attention_mask, cache)
        return self.logits(self.ln_f(x[:, -1]))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, C) -> (…, vocab_size), without the padding rows."""
        return linear(x, self.wte.weight[: self.config.vocab_size])

    def loss(self, x: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """x: (B, T, C), targets: (B, T) -> cross-entropy in nats, the mean or, with "none", (B, T)."""
        x, weight, flat = x.flatten(0, 1), self.wte.weight, targets.flatten()
        if cross_entropy.applies(x, weight):
            loss = cross_entropy.linear_cross_entropy(
                x, weight, flat, vocab_size=self.config.vocab_size, reduction=reduction
            )
        else:
            # The product includes the padding rows, which is the faster shape. A bias of -inf takes them out of the
            # softmax without another copy of the logits.
            bias = x.new_zeros(len(weight))
            bias[self.config.vocab_size :] = -math.inf
            loss = F.cross_entropy(F.linear(x, weight, bias), flat, reduction=reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.wte.weight.dtype
