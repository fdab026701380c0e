"""The model that a run starts with: new, or from a checkpoint, a directory or the Hub.

Checks that it fits the data and the settings.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.config import ARCHITECTURES, TrainConfig
from gpt2_accel.data.source import Data
from gpt2_accel.hf.chat_template import with_rows
from gpt2_accel.hf.convert import (
    configured_shape,
    from_pretrained,
    is_custom,
    load_weights,
    local_directory,
)
from gpt2_accel.hf.lora import NEEDS_MODEL, add_lora, set_dtype
from gpt2_accel.hf.safetensors_files import weights_digest
from gpt2_accel.hf.tensors import check_finite
from gpt2_accel.models import LanguageModel, ModelConfig, check_loaded
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.tokenizer import (
    PreTrainedTokenizerBase,
    check_vocabulary,
    document_marks,
    load_tokenizer,
)

NewModel = Callable[[Any, PreTrainedTokenizerBase], torch.nn.Module]
"""(settings, the tokenizer of the data) -> a model."""


def build_model(
    config: TrainConfig,
    data: Data,
    checkpoint: Path | None,
    given: "torch.nn.Module | NewModel | None",
) -> LanguageModel:
    """Builds a new model, or loads the model of `checkpoint`, otherwise of `config.init_from`.

    `given` is the user's model, which gets their weights. Raises `ValueError` if the model does not
    fit the data's tokenizer, the sequence length or the configured shape.
    """
    source = checkpoint or config.init_from
    if config.lora and (source is None or given is not None):
        raise ValueError(NEEDS_MODEL)
    users = None if given is None else users_model(config, data.tokenizer, given)
    if source is None:
        model = users or configured_shape(config, len(data.tokenizer)).build()
    else:
        verify = checkpoint is None  # `find_checkpoint` has verified that
        directory = verified_directory(source, verify)
        merge = not (config.lora and checkpoint)  # an adapter to start from is part of the base
        model = load_model(config, data, Path(local_directory(directory)), users, merge)
    n_positions = model.config.n_positions
    config.fit_positions(n_positions)
    length = config.tokens_per_row
    if length > n_positions:
        other = "choose another --init_from" if config.init_from else "raise --n_positions"
        raise ValueError(
            f"sequence_length ({length}) exceeds n_positions ({n_positions}): lower "
            f"--sequence_length or {other}"
        )
    return model


def users_model(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    given: "torch.nn.Module | NewModel",
) -> Any:
    """Returns the user's model, or builds it. Raises `ValueError` if a run cannot train it."""
    model: Any = given
    if callable(given) and not isinstance(given, torch.nn.Module):
        model = given(config, tokenizer)
    shape = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(shape, ModelConfig):
        raise ValueError(
            f"the model is a {type(model).__name__}, not a module whose config is a ModelConfig: "
            "give what docs/change.md lists"
        )
    wanted = config.architecture
    if wanted in ARCHITECTURES and shape.architecture != wanted:
        raise ValueError(
            f"--architecture is {wanted}, but the given model is {shape.architecture}: leave out "
            "--architecture"
        )
    return model


def load_model(
    config: TrainConfig,
    data: Data,
    source: Path,
    given: LanguageModel | None,
    merge: bool,
) -> LanguageModel:
    """Loads the model of a directory, or its weights into the `given` model.

    For conversations it gets rows for tokens that only the data's tokenizer has. Raises
    `ValueError` if it does not fit the tokenizer or the settings.
    """
    tokenizer = data.tokenizer
    if given is None and is_custom(source):  # its code is the user's
        given = configured_shape(config, len(tokenizer)).build()
    if given is not None:
        model = given
        load_weights(model, source)
    else:
        model = from_pretrained(
            source,
            0.0 if config.lora and "dropout" not in config.given else config.dropout,
            attention=config.attn_implementation,
            reason="--lora" if config.lora else None,
            merge=merge,
        )
    rows: Sequence[int] = ()
    check_finite(model, source)
    if (source / "tokenizer.json").exists():
        source_tokenizer = load_tokenizer(source)
        more = source_tokenizer.get_vocab().items() < tokenizer.get_vocab().items()
        if given is None and data.chat and more:
            rows = range(len(source_tokenizer), len(tokenizer))
            model = with_rows(model, len(source_tokenizer), len(tokenizer))
        else:
            data.check_tokenizer(source_tokenizer, source)
    # A published model may have more rows than its tokenizer has tokens, as Qwen3 has.
    check_vocabulary(tokenizer, model.config.vocab_size, source)
    if given is not None:
        return model
    if config.lora:
        assert isinstance(model, AnyModel)
        if not model.adapter:
            if config.init_from is None:
                raise ValueError(NEEDS_MODEL)
            base = str(source.resolve())
            if not Path(config.init_from).is_dir():  # the cache names the commit
                base = f"{config.init_from.partition('@')[0]}@{source.name}"
            add_lora(model, config, rows, base, weights_digest(source))
    if config.init_from is not None:
        check_loaded(config, model.config)
    return model


def adapt(model: LanguageModel, config: TrainConfig) -> None:
    """Applies settings to a model. Raises `ValueError` for a setting that it does not have."""
    set_dtype(model, config)
    model.checkpoint_activations = config.checkpoint_activations
    if config.router_aux_loss is not None:
        if getattr(model, "aux_coefficient", None) is None:
            raise ValueError(
                "the model has no load balancing loss of experts: leave out --router_aux_loss"
            )
        model.aux_coefficient = config.router_aux_loss


def document_separator(data: Data) -> int:
    """Returns the token id that separates the documents of the data.

    Raises `ValueError` if there is none, if the tokenizer does not know it, as in data of 0.4, or
    if the parts of a mixture have different ones.
    """
    begin, end = document_marks(data.tokenizer)
    known = [token for token in (*begin, *end) if data.separators == {token}]
    if not known:
        raise ValueError(
            f"document_mask needs a token that separates all documents, and {data.name} has none: "
            "leave it out, or prepare the text with a tokenizer that has <|endoftext|>, BOS or EOS"
        )
    return known[0]
