"""A `GPT` that reads on from where it was: keys and values of earlier tokens are kept, not recomputed.

It is the forward of `model.py`, with its weights, written again: here the keys and values of all but the
newest tokens come from memory that was reserved once, as one block of slots, and a single token is a vector. Rows of different lengths are padded on the left, so that all of them end at the same slot.

Shape letters as in `model.py`, and S slots.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from gpt2_accel.launch import has_cpp_compiler
from gpt2_accel.model import GPT, CausalSelfAttention

Layers = list[tuple[torch.Tensor, torch.Tensor]]  # of each block, keys and values: (B, H, S, C/H)


class KVCache:
    """What a model in evaluation mode has read of some rows of tokens.

    `rows` are token ids, at least one in each row, `slots` the tokens that the longest row may come to,
    at most `n_positions`. Device and dtype are those of the weights. With `compile` the forward of one
    token is compiled: for one row, for several, and for several of different lengths, once each.

    `logits` (B, vocab_size) are those of the token that follows each row, in the dtype of the weights.
    """

    def __init__(self, model: GPT, rows: Sequence[list[int]], slots: int, *, compile: bool = False):
        config, weight = model.config, model.wte.weight
        longest = max(map(len, rows))
        assert 0 < min(map(len, rows)) and longest <= slots <= config.n_positions
        self.model, self.compile = model, compile
        self.end = 0  # slots in use
        padding = [longest - len(row) for row in rows]
        self.padding = torch.tensor(padding, device=weight.device) if any(padding) else None
        # One slot more than is ever used: to the compiler, a slice of all slots is another case.
        shape = (len(rows), config.n_head, slots + 1, config.n_embd // config.n_head)
        self.layers: Layers = [
            (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.n_layer)
        ]
        padded = [[0] * pad + row for pad, row in zip(padding, rows, strict=True)]
        self.logits = self._read(torch.tensor(padded, device=weight.device))

    def repeat(self, times: int) -> None:
        """Puts so many copies of each row one after the other."""
        if times > 1:
            self.layers = [
                (keys.repeat_interleave(times, dim=0), values.repeat_interleave(times, dim=0))
                for keys, values in self.layers
            ]
            self.logits = self.logits.repeat_interleave(times, dim=0)
            if self.padding is not None:
                self.padding = self.padding.repeat_interleave(times)

    def append(self, ids: torch.Tensor) -> None:
        """Reads the next token of each row, ids: (B,) int64."""
        self.logits = self._read(ids[:, None])

    def _read(self, input_ids: torch.Tensor) -> torch.Tensor:
        T = input_ids.shape[1]
        self.end += T
        slots = torch.arange(self.end - T, self.end, device=input_ids.device)
        positions, mask = slots[None], None
        if self.padding is not None:
            positions = (slots - self.padding[:, None]).clamp(min=0)  # (B, T)
            mask = padding_mask(self.padding, slots, self.end)
        run = compiled() if self.compile and T == 1 and self.end > 1 else forward
        return run(self.model, input_ids, positions, mask, self.layers, slots, self.end)


def padding_mask(padding: torch.Tensor, slots: torch.Tensor, end: int) -> torch.Tensor:
    """Which of the first `end` slots the tokens in `slots` (T) see: (B, 1, T, end), True where they do.

    A pad slot sees itself, since a softmax over nothing would be NaN; nobody else sees it.
    """
    seen = torch.arange(end, device=slots.device)
    causal = seen <= slots[:, None]  # (T, end)
    itself = seen == slots[:, None]
    filled = seen >= padding[:, None, None, None]  # (B, 1, 1, end)
    return causal & (filled | itself)


def forward(
    model: GPT,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    layers: Layers,
    slots: torch.Tensor,
    end: int,
) -> torch.Tensor:
    """`GPT.forward` of tokens that go to `slots` (T), the last of the first `end`.

    input_ids: (B, T), positions: (B or 1, T). Without a `mask` the rows have no padding, and either T is
    1 or the cache was empty. Returns (B, vocab_size), the logits of what follows the last token.
    """
    x = model.wte(input_ids) + model.wpe(positions)  # (B, T, C)
    for block, (keys, values) in zip(model.h, layers, strict=True):
        x = x + attend(block.attn, block.ln_1(x), mask, keys, values, slots, end)
        hidden = linear(block.ln_2(x), block.mlp.c_fc.weight, block.mlp.c_fc.bias)
        hidden = F.gelu(hidden, approximate=block.mlp.gelu)
        x = x + linear(hidden, block.mlp.c_proj.weight, block.mlp.c_proj.bias)
    return linear(model.ln_f(x[:, -1]), model.wte.weight[: model.config.vocab_size])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`: x (…, in), weight (out, in), bias (out) -> (…, out).

    Of a single token it is a product of a matrix and a vector, which on a CPU in bf16 takes three quarters of the
    time: both read the weight once, but this one without packing it for a larger product. inductor's own
    product of that kind is slower.
    """
    single = x.numel() == weight.shape[1] and x.device.type == "cpu"
    if not single or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    vector = x.view(-1)
    y = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)
    return y.view(*x.shape[:-1], -1)


def attend(
    attention: CausalSelfAttention,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    end: int,
) -> torch.Tensor:
    """`CausalSelfAttention.forward` over the cache, to which it adds: x (B, T, C) -> (B, T, C)."""
    B, T, C = x.shape
    q, k, v = (
        part.view(B, T, attention.n_head, C // attention.n_head).transpose(1, 2)  # (B, H, T, C/H)
        for part in linear(x, attention.c_attn.weight, attention.c_attn.bias).split(C, dim=2)
    )
    keys.index_copy_(2, slots, k)
    values.index_copy_(2, slots, v)
    causal = mask is None and T > 1
    k, v = keys[:, :, :end], values[:, :, :end]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    y = y.transpose(1, 2).reshape(B, T, C)
    return linear(y, attention.c_proj.weight, attention.c_proj.bias)


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    """`forward`, compiled for any length. Raises `ValueError` where there is nothing to compile with."""
    if not torch.cuda.is_available() and not has_cpp_compiler():
        raise ValueError("compile needs a C++ compiler: install g++, set CXX, or leave compile out")
    return torch.compile(forward, dynamic=True)
