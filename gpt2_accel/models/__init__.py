"""The base classes of a model and its config.

Training, checkpoints, evaluation and the estimates use nothing else. Only three places know an
architecture by name: its module here, its conversion in `hf/`, and `config.ARCHITECTURES`.

Shape letters: B batch, T sequence, C width.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpt2_accel import kernels
from gpt2_accel.kernels import attention, cross_entropy
from gpt2_accel.models.parts import (
    Mask,
    document_mask,
    document_positions,
    head_loss,
    sequence_positions,
)
from gpt2_accel.optim import is_expert
from gpt2_accel.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from gpt2_accel.config import TrainConfig


class ModelConfig:
    """The shape of a model. A subclass is a dataclass with the fields of its architecture."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    architecture: str  # the module here and in `hf/`, and the `model_type` of `config.json`
    vocab_size: int
    n_positions: int
    n_layer: int
    n_head: int
    n_kv_head: int  # heads of keys and values
    head_dim: int  # channels of a head
    n_embd: int
    dropout: float
    soft_cap: float | None = None  # limits the logits, see `cross_entropy.capped`
    experts_per_token: int | None = None  # experts that compute on a token

    @property
    def has_plain_head(self) -> bool:
        """Whether the logits are a matrix product, so the loss is computed in chunks."""
        return True

    @classmethod
    def from_settings(cls, settings: "TrainConfig", vocab_size: int) -> "ModelConfig":
        """Returns the shape that a `TrainConfig` describes, or raises `ValueError`."""
        raise NotImplementedError

    def build(self) -> "LanguageModel":
        """Builds a model of this shape with newly initialised weights."""
        raise NotImplementedError

    def with_depth(self, n_layer: int) -> "ModelConfig":
        """Returns the shape with its first `n_layer` layers."""
        return replace(self, n_layer=n_layer)

    @cached_property
    def _counts(self) -> tuple[int, int]:
        """The number of parameters, and of those that compute on a token.

        The second number excludes embeddings that are only looked up, as nanoGPT counts, and
        experts that are not chosen. Vocabulary padding is in neither. Takes no memory for weights.
        """
        with torch.device("meta"):
            model = self.build()
        head = model.head_weight
        embeddings = [
            module.weight for module in model.modules() if isinstance(module, nn.Embedding)
        ]
        tied = any(weight is head for weight in embeddings)
        looked_up = {id(weight) for weight in embeddings if weight is not head}
        padding = (self.padded_vocab_size - self.vocab_size) * self.n_embd
        total = -padding if tied else -2 * padding
        active = -padding
        chosen = self.experts_per_token or 1
        for name, parameter in model.named_parameters():
            total += parameter.numel()
            if id(parameter) not in looked_up:
                experts = len(parameter) if is_expert(name, parameter) else chosen
                active += parameter.numel() * chosen // experts
        return total, active

    @property
    def parameter_count(self) -> int:
        """The number of saved parameters: a tied head counts once, vocabulary padding does not."""
        return self._counts[0]

    @property
    def matmul_parameters(self) -> int:
        """The N in 6N FLOPs per token: the parameters that compute on a token."""
        return self._counts[1]

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: a multiple of 128, for faster matrix products."""
        return round_up(self.vocab_size, 128)


def config_class(name: str | None) -> type[ModelConfig]:
    """Returns the config class of an architecture in `config.ARCHITECTURES`, GPT-2's for None."""
    return import_module(f"gpt2_accel.models.{name or 'gpt2'}").CONFIG


def check_loaded(settings: "TrainConfig", shape: ModelConfig) -> None:
    """Raises `ValueError` if the model that the settings name has another shape than they give.

    That is `init_from`, or without it the directory or Hub id in `architecture`. A size that the
    settings leave at its default is not compared.
    """
    source = settings.init_from or settings.architecture
    wanted: dict[str, Any] = {"n_layer": settings.depth}
    if settings.init_from:
        wanted["architecture"] = settings.architecture
    for name in ("n_layer", "n_head", "n_embd"):
        value = getattr(settings, name)
        if value != getattr(type(settings), name):
            wanted[name] = value
    for name, value in wanted.items():
        actual = getattr(shape, name)
        if value not in (None, actual):
            raise ValueError(
                f"{source} has {name} {actual}, not {value}: leave out --architecture and sizes, "
                "which are for a new model, or name another model"
            )


def layers_heads_width(settings: "TrainConfig", head: int = 64) -> tuple[int, int, int]:
    """Returns layers, heads and width of a `TrainConfig`.

    A `depth` of N means N layers of width 64·N, rounded up to a multiple of `head`, the channels
    of a head. That is nanochat's rule, with heads of 128.
    """
    if settings.depth:
        n_head = ceil_div(64 * settings.depth, head)
        return settings.depth, n_head, n_head * head
    return settings.n_layer, settings.n_head, settings.n_embd


class LanguageModel(nn.Module):
    """A language model. A subclass has the modules, `config_class`, `hidden` and `head_weight`.

    The token embedding and the head have `config.padded_vocab_size` rows. The padding rows are
    zero, get no gradient, and are excluded from the loss, from the logits that `forward` returns,
    and from saved files.

    `separator` is the token that starts each document. If it is set, attention stays inside
    documents; positions run on. `checkpoint_activations` stores only the input of each block and
    recomputes the block in the backward pass (Chen et al., 2016, arXiv:1604.06174). Under autocast
    the residual stream is in `residual_dtype`. A submodule may have `stacked`, the number of equal
    matrices along the rows of its weight, such as q, k and v; Muon updates each separately.
    """

    config_class: ClassVar[type[ModelConfig]]
    separator: int | None = None
    checkpoint_activations = False
    residual_dtype = torch.float32
    aux_coefficient: float | None = None  # weight of the load balancing loss, if there is one
    generation: Any = None  # the `GenerationConfig` of the directory that it was loaded from
    residual: ClassVar[tuple[str, ...]]  # name endings of projections to the residual stream

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises the weights, unless they are on the meta device.

        Matrices and embeddings are N(0, 0.02), matrices in `residual` N(0, 0.02 / sqrt(2·n_layer)),
        biases 0 and gains of norms 1. Sources: the GPT-2 paper, section 2.3; for the 0.02 OpenAI's
        released code and `initializer_range` in transformers' `LlamaConfig` and `Qwen3Config`.
        """
        if self.device.type == "meta":
            return
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                is_residual = name.endswith(self.residual)
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if is_residual else 0.02
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.head_weight[self.config.vocab_size :] = 0

    def residual_stream(self, x: torch.Tensor) -> torch.Tensor:
        """Returns embeddings x: (B, T, C) in the dtype of the residual stream.

        Under autocast it does not depend on the dtype in which FSDP2 gathers the embedding.
        """
        return x.to(self.residual_dtype) if torch.is_autocast_enabled(x.device.type) else x

    def run_blocks(
        self,
        blocks: nn.ModuleList,
        x: torch.Tensor,
        *inputs: object,
        cache: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Returns the output of the last block. x: (B, T, C) -> (B, T, C).

        Each block gets x, the `inputs`, and its layer of the cache or None.
        """
        for number, block in enumerate(blocks):
            past = None if cache is None else cache[number]
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, *inputs, past, use_reentrant=False)
            else:
                x = block(x, *inputs, past)
        return x

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Mask | None,
        cache: Sequence[Any] | None,
    ) -> torch.Tensor:
        """Returns the input of the head, (B, T, C), after the final norm.

        `forward` describes the arguments. Positions may also be (T,), the mask a `BlockMask`.
        """
        raise NotImplementedError

    @property
    def head_weight(self) -> torch.Tensor:
        """The matrix of the output head, (padded_vocab_size, C)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        reduction: str = "mean",
        documents: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        cache: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits, (B, T, vocab_size), or the loss in nats if there are `targets`.

        - input_ids: (B, T), integers below `vocab_size`.
        - targets: (B, T), the token after each position (already shifted, unlike HF's `labels`),
          -100 to ignore a position.
        - reduction: "mean" returns the mean loss of the targets, a scalar; "none" the loss of each
          target, (B, T), 0 at -100.
        - documents: (B, T), the number of each token's text in a row of several texts, which never
          falls along the row. Positions restart with each text, and attention stays inside it.
        - position_ids: (B, T) below `n_positions`, the position of each token in its text, where
          texts are not contiguous. attention_mask is (B, 1, T, T) bool, True where attended.
        - logits_to_keep: computes the logits of that many last positions only, whose `targets` are
          given; 0 computes all.
        - cache: from `new_cache`, holds the keys and values of the tokens before; the forward
          appends the keys and values of `input_ids`. It needs `position_ids`, and an
          `attention_mask`, (B, 1, T, keys), over all keys that it returns; None for an empty cache
          and for a single token, if no row has padding.

        The loss is computed here because Accelerate copies the outputs of a mixed-precision forward
        to fp32. Raises `ValueError` if T exceeds `n_positions` without `position_ids`.
        """
        config = self.config
        if documents is not None:
            position_ids = document_positions(documents, config.n_positions)
        elif position_ids is None:
            position_ids = sequence_positions(input_ids, config.n_positions)
        unmasked = documents is None and attention_mask is None and cache is None
        if self.separator is not None and unmasked:
            documents = (input_ids == self.separator).cumsum(dim=1)
        mask: Mask | None = attention_mask
        if documents is not None:
            mask = self.document_mask(documents)
        x = self.hidden(input_ids, position_ids, mask, cache)[:, -logits_to_keep:]
        weight = self.head_weight
        if targets is None:
            logits = F.linear(x, weight)  # padding rows too: they align the memory
            return cross_entropy.capped(logits[..., : config.vocab_size], config.soft_cap)
        return head_loss(x, weight, targets, config.vocab_size, reduction, config.soft_cap)

    def document_mask(self, documents: torch.Tensor) -> Mask:
        """Returns the causal mask inside documents; documents: (B, T), as in `forward`."""
        dropout = self.config.dropout if self.training else 0.0
        chosen = kernels.choices.enabled and kernels.choices.block_masks
        if chosen and self.config.head_dim >= attention.NARROWEST and not dropout:
            return attention.document_blocks(documents)
        return document_mask(documents)

    def new_cache(self, slots: int = 0) -> Any:
        """Returns an empty KV cache, a cache layer of `transformers` for each block.

        With `slots` it has memory for that many tokens, else it grows. For a class of
        `transformers` it is a cache of that class, or None.
        """
        from transformers.cache_utils import DynamicLayer, StaticLayer

        layers = range(self.config.n_layer)
        return [StaticLayer(slots) if slots else DynamicLayer() for _ in layers]

    def tie_weights(self) -> None:
        """Ties shared parameters again, after `load_state_dict` has assigned them separately."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.head_weight.dtype


def skeleton(model: LanguageModel) -> LanguageModel:
    """Returns a copy of a model whose parameters have shapes and no memory (on the meta device)."""
    memo = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def filled(empty: LanguageModel, tensors: Mapping[str, torch.Tensor]) -> LanguageModel:
    """Returns a copy of a `skeleton` that uses the tensors of a state dict without copying them."""
    model = copy.deepcopy(empty)
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return model


def convert_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Converts the parameters of a model. Buffers keep their dtype, such as rotary frequencies.

    So does `transformers` when it opens a model in bf16.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode inside the context, and restores its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
