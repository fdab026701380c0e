"""The interface between a model and the rest of the package.

A model is an `nn.Module` with the attributes and methods of `LanguageModel`, built by a config with those of
`ModelConfig`. Training, checkpoints, evaluation, generation and the estimates use nothing else. Only two files know an
architecture by name: its module here and its conversion in `hf/`.

Shape letters: B batch, T sequence, S cached positions, H heads of keys and values, D channels of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class LayerCache(NamedTuple):
    """The cached keys and values of one layer, in memory that is allocated once.

    keys, values: (B, H, slots, D). `slots`, (T,) int64, are the slots of the next tokens; `end` is the number of slots
    in use including them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    end: int

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values of the next tokens, (B, H, T, D) each; returns all, (B, H, S, D)."""
        self.keys.index_copy_(2, self.slots, k)
        self.values.index_copy_(2, self.slots, v)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class ModelConfig(Protocol):
    """The shape of a model.

    `padded_vocab_size` counts the rows of the token embedding, `parameter_count` the parameters as saved.
    `matmul_parameters` is the N in 6N FLOPs per token; `attention_width` is layers x heads x channels per head, the
    L·H·Q of the attention's FLOPs. `cache_shape` gives the layers, heads and channels per head of the KV cache. `build`
    makes a model with newly initialised weights.
    """

    vocab_size: int
    n_positions: int
    n_layer: int
    n_embd: int
    dropout: float
    padded_vocab_size: int
    parameter_count: int
    matmul_parameters: int
    attention_width: int
    cache_shape: tuple[int, int, int]

    def build(self) -> "LanguageModel": ...


class LanguageModel(Protocol):
    """A model. `forward` and `decode` are documented in `models/gpt2.py`.

    `head_weight` is the matrix of the output head, (padded_vocab_size, n_embd).
    `separator` is the token that starts each document, if attention must not cross from one document to the next.
    `checkpoint_activations` recomputes each block in the backward pass. `device` and `dtype` are those of the weights.
    `forward(input_ids, targets=None, *, reduction="mean", position_ids=None, attention_mask=None, logits_to_keep=0)`
    returns logits (B, T, vocab_size), or with `targets` the loss in nats, a scalar or with "none" (B, T).
    A submodule whose weight stacks several equal matrices along its rows, such as q, k and v, has their number as
    `stacked`; Muon updates each separately.
    """

    config: ModelConfig
    head_weight: torch.Tensor
    separator: int | None
    checkpoint_activations: bool
    device: torch.device
    dtype: torch.dtype

    def __call__(self, input_ids: torch.Tensor, *args, **kwargs) -> torch.Tensor: ...

    def decode(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Sequence[LayerCache],
    ) -> torch.Tensor: ...
