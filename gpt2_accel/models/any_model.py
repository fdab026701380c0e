"""Any causal language model of `transformers`, in the form that the rest of the package uses.

The class of `transformers` computes everything, also its KV cache. The loss is computed in chunks
if the logits are exactly the head applied to the hidden states.

Shape letters: B batch, T sequence, C width, V vocabulary.
"""

import copy
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gpt2_accel.models import LanguageModel, ModelConfig
from gpt2_accel.models.parts import document_positions, head_loss, logits_loss, sequence_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

# Fields of a `config.json` that do not affect the shape of the model.
NOT_SHAPE = (
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "use_cache",
    "output_router_logits",
)
POSITIONS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "n_positions",
    "n_ctx",
)
UNLIMITED = 2**20  # positions of a model without a limit, such as Mamba
LARGE = 100.0  # scale of hidden states at which a soft cap on logits shows
SAMPLE_VOCABULARY = 128
LENGTHS = (11, 19)  # tokens of the documents in two trial rows
# A crossing is an error above this share of a planted one, or of the logits' standard deviation.
CROSSES = 1e-3
# A planted crossing has to be larger than this share of the logits' standard deviation.
ROUNDING = 1e-4


@dataclass
class AnyConfig(ModelConfig):
    """The shape of a model of `transformers`: the fields of its `config.json`.

    `attention` is transformers' `attn_implementation`, None for the class's default. `note` says
    why no module of `models/` is used. `hf` is the config of `transformers`, without special
    tokens.
    """

    values: dict[str, Any]
    attention: str | None = field(default=None, compare=False)
    note: str = field(default="", compare=False)
    dropout = 0.0  # the rates of the class's config are used

    def __post_init__(self) -> None:
        from transformers import CONFIG_MAPPING

        self.values = {name: v for name, v in self.values.items() if name not in NOT_SHAPE}
        # The ids of a class may lie beyond the vocabulary, as Phi3's padding token does.
        no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        self.hf = CONFIG_MAPPING[self.values["model_type"]].from_dict(self.values | no_ids)
        self.architecture = self.hf.model_type
        self.vocab_size = self.hf.vocab_size
        positions = (getattr(self.hf, name, None) for name in POSITIONS)
        self.n_positions = next((number for number in positions if number), UNLIMITED)
        self.n_layer = self.hf.num_hidden_layers
        self.n_head = getattr(self.hf, "num_attention_heads", 0)
        self.n_embd = self.hf.hidden_size
        self.experts_per_token = getattr(self.hf, "num_experts_per_tok", None)
        own = self.values.get("head_dim")  # the attribute is ambiguous in Gemma 4
        self.head_dim = own or self.n_embd // max(self.n_head, 1)

    @property
    def padded_vocab_size(self) -> int:
        return self.vocab_size

    @cached_property
    def behaviour(self) -> "Behaviour":
        """What the class computes, found by trying it, see `try_class`."""
        with unset_fake_temporarily():  # it computes, also while memory is estimated
            return try_class(self)

    @property
    def has_plain_head(self) -> bool:
        """Whether the logits are the head applied to the hidden states."""
        return self.behaviour.plain_head

    @property
    def aux_weight(self) -> float | None:
        """The weight of the load balancing loss of experts; None if the class computes none."""
        weight = getattr(self.hf, "aux_loss_coef", None)  # JetMoe's name
        weight = getattr(self.hf, "router_aux_loss_coef", weight)
        return None if weight is None or not self.behaviour.aux_loss else float(weight)

    def changed(self, **values: Any) -> "AnyConfig":
        """Returns the shape with other values, such as another `vocab_size`."""
        return AnyConfig(self.values | values, self.attention, self.note)

    def by_layer(self) -> dict[str, list[Any]]:
        """Returns the fields with a value for each layer, such as `layer_types`."""
        return {
            name: value
            for name, value in self.values.items()
            if isinstance(value, list) and len(value) == self.n_layer
        }

    def with_depth(self, n_layer: int) -> "AnyConfig":
        """Returns the shape with its first `n_layer` layers.

        Returns the whole shape if its config class refuses fewer, as GPT-Neo's does.
        """
        changed = copy.deepcopy(self.hf)
        for name, value in self.by_layer().items():
            setattr(changed, name, value[:n_layer])
        changed.num_hidden_layers = n_layer
        try:
            return self.changed(**changed.to_dict())
        except Exception:  # the classes raise several types
            return self

    def sample(self) -> "AnyConfig":
        """Returns a small shape on which to try what the class computes.

        It has a small vocabulary, no dropout, and the first layers, up to one of each kind.
        """
        # A layer's kind may also follow from its number.
        kinds = list(zip(layer_structures(self), *self.by_layer().values(), strict=True))
        first = [kinds.index(kind) for kind in kinds]
        shape = self.with_depth(max(first, default=0) + 1)
        ends = ("dropout", "_pdrop", "_dropout_rate")
        rates = {name: 0.0 for name in shape.values if name.endswith(ends)}
        sample = shape.changed(**rates, vocab_size=SAMPLE_VOCABULARY)
        sample.hf.pad_token_id = 0  # RoBERTa and its relatives need one
        return sample

    def build_inner(self) -> "PreTrainedModel":
        """Builds the class of `transformers` with newly initialised weights."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(
            copy.deepcopy(self.hf), attn_implementation=self.attention
        )

    def build(self) -> "AnyModel":
        return AnyModel(self, self.build_inner())


def layer_structures(shape: AnyConfig) -> list[list[type]]:
    """Returns the classes of the modules of each layer; none if the layers are not in one list.

    Takes no memory for weights.
    """
    with torch.device("meta"):
        inner = shape.build_inner()
    for stack in inner.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == shape.n_layer:
            return [[type(module) for module in layer.modules()] for layer in stack]
    return [[]] * shape.n_layer


def random_model(shape: AnyConfig) -> "PreTrainedModel":
    """Builds the small shape of the class with random weights, on the CPU, in evaluation mode.

    Torch's random state does not change.
    """
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(0)
        return shape.sample().build_inner().eval()


class Behaviour(NamedTuple):
    """What a class of `transformers` computes.

    `sees_later_tokens`: its logits depend on later tokens, as BERT's do. `plain_head`: they are the
    head applied to the hidden states, without bias, scale, soft cap. `aux_loss`: in training mode
    it computes a load balancing loss.
    """

    sees_later_tokens: bool
    plain_head: bool
    aux_loss: bool


@torch.no_grad()
def try_class(shape: AnyConfig) -> Behaviour:
    """Tries what a class computes, on a small model with random weights.

    The test of the head uses hidden states of a large scale.
    """
    model = random_model(shape)
    input_ids = torch.arange(1, 17, device="cpu").repeat(2, 1)
    input_ids[1, -1] += 1  # the rows differ in the last token
    first, second = model(input_ids, use_cache=False).logits[:, :-1]
    later = bool((first - second).abs().max() > CROSSES * first.std())
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None
    plain = plain and "logits_to_keep" in inspect.signature(model.forward).parameters
    if plain:
        seen: list[torch.Tensor] = []
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * LARGE,))
        head.register_forward_hook(lambda *call: seen.append(call[-1]))
        plain = torch.equal(model(input_ids, use_cache=False).logits, seen[0])
    try:
        with torch.random.fork_rng(devices=()):  # routers may add noise
            outputs = model.train()(input_ids, use_cache=False, output_router_logits=True)
        balanced = torch.is_tensor(getattr(outputs, "aux_loss", None))
    except Exception:  # classes raise many types, such as where no layer has experts
        balanced = False
    return Behaviour(later, plain, balanced)


class Head(nn.Linear):
    """The output head of a class.

    With `skipped` it returns its input, so the class's forward returns the hidden states.
    """

    skipped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, V), or x."""
        return x if self.skipped else super().forward(x)


class AnyModel(LanguageModel):
    """A causal language model of `transformers`, `inner`, as a `LanguageModel`."""

    config: AnyConfig
    config_class = AnyConfig

    def __init__(self, config: AnyConfig, inner: "PreTrainedModel"):
        super().__init__(config)
        self.inner = inner
        self._no_split_modules = sorted(inner._no_split_modules or ())  # Accelerate shards these
        self.accepts = frozenset(inspect.signature(inner.forward).parameters)
        self.aux_coefficient = config.aux_weight
        self._checkpoints = False
        # peft's model around `inner`, and the digest of the base's weights: see `hf/lora.py`. In a
        # tuple it is not a submodule.
        self.adapter: tuple[Any, ...] = ()
        if config.has_plain_head:
            inner.get_output_embeddings().__class__ = Head

    @property
    def checkpoint_activations(self) -> bool:
        """Whether the class stores only the input of each block."""
        return self._checkpoints

    @checkpoint_activations.setter
    def checkpoint_activations(self, enabled: bool) -> None:
        self._checkpoints = enabled
        if enabled:
            old = self.inner.gradient_checkpointing_enable  # the name before transformers 5.20
            enable = getattr(self.inner, "activation_checkpointing_enable", old)
            enable({"use_reentrant": False})

    def tie_weights(self) -> None:
        """Ties the head to the token embedding, if the class does."""
        if not self.adapter:
            self.inner.tie_weights()
        elif self.inner.config.tie_word_embeddings:  # peft may have replaced both modules
            embedding = self.inner.get_input_embeddings()
            head = self.inner.get_output_embeddings()
            embedding = getattr(embedding, "original_module", embedding)
            head = getattr(head, "original_module", head)
            head.weight = embedding.weight

    @property
    def head_weight(self) -> torch.Tensor:
        return self.inner.get_output_embeddings().weight

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
        """Returns the logits, or the loss if there are `targets`, as `LanguageModel.forward` does.

        `attention_mask` is (B, keys), True where a token is not padding. `cache` is a cache of the
        class. In training a mixture of experts returns a pair: the loss plus `aux_coefficient`
        times the load balancing loss, and that loss, detached.
        """
        if documents is None and self.separator is not None and cache is None:
            documents = (input_ids == self.separator).cumsum(dim=1)
        if documents is not None:
            # Positions that restart keep the documents apart, see `documents_cross`.
            position_ids = document_positions(documents, self.config.n_positions)
        elif cache is None:
            sequence_positions(input_ids, self.config.n_positions)  # raises for too many
        balanced = bool(self.aux_coefficient) and self.training and targets is not None
        head = self.inner.get_output_embeddings()
        chunked = type(head) is Head and targets is not None
        options: dict[str, Any] = {
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "cache": cache,
            "past_key_values": cache,  # the name before transformers 5.24
            "use_cache": cache is not None,
            "logits_to_keep": logits_to_keep,
            "output_router_logits": True if balanced else None,
        }
        options = {k: v for k, v in options.items() if v is not None and k in self.accepts}
        if type(head) is Head:
            head.skipped = chunked
        outputs = self.inner(input_ids, **options)
        logits = outputs.logits[:, -logits_to_keep:]  # hidden states if the head is skipped
        if targets is None:
            return logits
        if chunked:
            loss = head_loss(logits, head.weight, targets, len(head.weight), reduction)
        else:
            loss = logits_loss(logits, targets, reduction)
        if not balanced:
            return loss
        aux_loss = outputs.aux_loss.float()
        return loss + self.aux_coefficient * aux_loss, aux_loss.detach()

    def new_cache(self, slots: int = 0) -> "Cache | None":
        """Returns an empty KV cache of the class.

        Returns None if its forward takes no `DynamicCache`, or no positions, which padding needs.
        """
        from transformers import DynamicCache

        kind: Any = type(self.inner)
        takes = self.accepts & {"cache", "past_key_values"} and "position_ids" in self.accepts
        if not takes or not kind._supports_default_dynamic_cache():
            return None
        return DynamicCache(config=self.inner.config)


def documents_cross(
    shape: AnyConfig, checkpoint_activations: bool = False, backend: str | None = None
) -> bool:
    """Whether attention crosses from one document to the next although positions restart.

    Compares two rows of documents with the documents alone, in fp32 and training mode, and the
    error with the error of positions that run on. `backend` is for `torch.compile`, None for eager.
    """
    model = AnyModel(shape, random_model(shape)).train()
    model.checkpoint_activations = checkpoint_activations
    run = model if backend is None else torch.compile(model, backend=backend, dynamic=True)
    input_ids = torch.arange(1, 65).view(2, 32)
    documents = torch.stack([torch.arange(32) // length for length in LENGTHS])
    together = run(input_ids, documents=documents)
    crossing = model(input_ids)
    alone = torch.empty_like(together)
    for number in documents.unique():
        for row, own in enumerate(documents == number):
            if own.any():
                alone[row, own] = model(input_ids[row : row + 1, own])[0]
    error = (together - alone).abs().max()
    planted = (crossing - alone).abs().max()
    return not bool(planted > ROUNDING * alone.std() and error <= CROSSES * planted)


def keeps_documents_apart(shape: ModelConfig) -> bool:
    """Whether a model of this shape keeps documents in a row apart, as modules of `models/` do."""
    return not (isinstance(shape, AnyConfig) and documents_cross(shape))
