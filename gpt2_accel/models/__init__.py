"""The interface between a model and the rest of the package.

A model is an `nn.Module` with the attributes and methods of `LanguageModel`, made by a config with those of
`ModelConfig`. Training, checkpoints, evaluation, generation and the estimates use nothing else of it; the files
below it that know an architecture by name are its own module here and its conversion in `hf/`.

Shape letters: B batch, T sequence, S cached positions, H heads of keys and values, D channels of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class LayerCache(NamedTuple):
    """The keys and values of one layer for the tokens read so far, in memory that is reserved once.

    keys, values: (B, H, slots, D). `slots`, (T,) int64, are where the next tokens go; `end` the number of slots in
    use with them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    end: int

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores those of the next tokens, (B, H, T, D) each; returns all of them, (B, H, S, D)."""
        self.keys.index_copy_(2, self.slots, k)
        self.values.index_copy_(2, self.slots, v)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class ModelConfig(Protocol):
    """The shape of a model."""

    vocab_size: int
    n_positions: int
    dropout: float

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding."""

    @property
    def parameter_count(self) -> int:
        """Parameters as saved."""

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied by, the N of 6N FLOPs per token."""

    @property
    def attention_width(self) -> int:
        """Layers x heads x channels of a head, the L·H·Q of the attention's FLOPs."""

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and channels of a head of the keys and values that generation keeps."""

    def build(self) -> "LanguageModel":
        """A model of this shape with fresh weights."""


class LanguageModel(Protocol):
    """What training, evaluation and generation call.

    `separator` is the token that begins each document, if attention is not to cross from one document to the next.
    `checkpoint_activations` recomputes each block in the backward pass.
    """

    config: ModelConfig
    separator: int | None
    checkpoint_activations: bool
    device: torch.device
    dtype: torch.dtype

    def __call__(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        reduction: str = "mean",
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        """Logits (B, T, vocab_size), or with `targets` the loss in nats, a scalar or with "none" (B, T)."""

    def decode(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Sequence[LayerCache],
    ) -> torch.Tensor:
        """Reads further tokens into a cache; returns the logits of what follows the last, (B, vocab_size)."""
