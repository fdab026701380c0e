"""Opens and writes the directories of `models/any_model.py`, by `transformers` itself."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpt2_accel.hf.lora import write_adapter
from gpt2_accel.models.any_model import AnyConfig, AnyModel
from gpt2_accel.runtime.files import sentence

if TYPE_CHECKING:
    from transformers import GenerationConfig


# Fields of a generation config on which others depend.
MODES = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")


def any_config(values: Mapping[str, Any], note: str, attention: str | None) -> AnyConfig:
    """Returns the shape in a `config.json`, for the class of `transformers`.

    `note` and `attention` as in `AnyConfig`. Raises `ValueError` if it is not a causal language
    model of text, is quantized, or needs remote code.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers has no model of the type {model_type!r} without remote code: choose "
            "another, or a newer transformers"
        )
    kind = CONFIG_MAPPING[model_type]
    config = kind.from_dict(kind._decode_special_floats(dict(values)))  # they stand for infinity
    kinds: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in kinds.keys() or config.is_encoder_decoder:
        raise ValueError(f"{model_type} is not a causal language model: choose a model of text")
    name = kinds[type(config)].__name__
    if config.get_text_config() is not config:
        raise ValueError(f"{name} is a multimodal model: choose a model of text only")
    if getattr(config, "quantization_config", None):
        raise ValueError(
            "its weights are quantized: choose the model before it was quantized (--base, for an "
            "adapter)"
        )
    shape = AnyConfig(config.to_dict(), attention, f"transformers' {name}: {note}")
    try:
        later = shape.behaviour.sees_later_tokens
    except Exception as error:  # classes raise many types
        raise ValueError(f"{name} fails on a text with this config: {sentence(error)}") from error
    if later:
        raise ValueError(
            f"{name} sees later tokens, so it cannot learn to predict them: choose a causal "
            "language model"
        )
    if shape.experts_per_token and shape.aux_weight is None:
        shape.note += "; it has no load balancing loss of its experts"
    return shape


def open_any(directory: Path, shape: AnyConfig) -> AnyModel:
    """Loads the weights of a directory in fp32 on the CPU, in training mode.

    The shape's `note` names tensors that the class does not have. Raises `ValueError` for a missing
    or misshapen tensor, which `transformers` would initialise at random, and if `transformers`
    cannot open the directory.
    """
    try:
        inner, report = open_class(
            directory,
            attn_implementation=shape.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # the library raises several types
        raise ValueError(f"transformers cannot open {directory}: {sentence(error)}") from error
    wrong = sorted(report["missing_keys"] | {entry[0] for entry in report["mismatched_keys"]})
    if wrong:
        raise ValueError(
            f"{directory} does not fit its config.json: {wrong[0]} is missing or has another shape"
        )
    unknown = sorted(report["unexpected_keys"])
    if unknown:
        shape.note += (
            f"; it does not have {unknown[0]}, one of {len(unknown)} such tensors of {directory}"
        )
    generation = inner.generation_config
    if (directory / "generation_config.json").is_file():
        generation._from_model_config = False  # the file is kept
    dropped = drop_contradictions(generation)
    if dropped:
        shape.note += f"; {', '.join(dropped)} in its generation_config.json cannot apply: left out"
    return AnyModel(shape, inner.train())


def read_generation(directory: Path) -> "GenerationConfig | None":
    """Returns the generation config of a directory, without fields that contradict others, None if
    there is none. Raises `OSError` if it is damaged."""
    from transformers import GenerationConfig

    if not (directory / "generation_config.json").is_file():
        return None
    generation = GenerationConfig.from_pretrained(directory)
    drop_contradictions(generation)
    return generation


def drop_contradictions(generation: "GenerationConfig") -> list[str]:
    """Resets the fields that `transformers` would refuse to save, and returns their names.

    Such as a temperature where `do_sample` is false.
    """
    from transformers import GenerationConfig

    modes = {name: getattr(generation, name) for name in MODES}
    dropped = []
    for name, value in generation.to_diff_dict().items():
        try:
            with quiet():
                GenerationConfig(**modes | {name: value}).validate(strict=True)
        except ValueError:
            setattr(generation, name, None)
            dropped.append(name)
    return dropped


def open_class(directory: Path, **options: Any) -> Any:
    """Opens a directory with the class of `transformers`, in fp32.

    `options` go to its `from_pretrained`, which may return a pair.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, use_safetensors=True, **options
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the progress bars and the reports of `transformers` inside the block."""
    from transformers.utils import logging as library

    shown = library.is_progress_bar_enabled()
    level = library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        library.set_verbosity(level)
        if shown:
            library.enable_progress_bar()


def write_any(
    model: AnyModel,
    folder: Path,
    ids: Mapping[str, int | None],
    ends: list[int],
    generation: "GenerationConfig",
) -> None:
    """Writes the files of the class's `save_pretrained`, or the adapter.

    For a model on the meta device it writes all files but the weights. `ids` are the tokenizer's
    special tokens, for those that the model's config does not have. `ends` are the tokens that end
    a text, and must end generation. `generation` is for a model without its own generation config.
    """
    if model.adapter:
        write_adapter(model, folder)
        return
    inner = model.inner
    if inner.generation_config._from_model_config:
        inner.generation_config = generation
    for target in (inner.config, inner.generation_config):
        for name, value in ids.items():
            if getattr(target, name, None) is None:
                setattr(target, name, value)
        known = target.eos_token_id
        if not isinstance(known, list):
            known = [known]
        if not set(ends) <= set(known):
            target.eos_token_id = ends[0] if len(ends) == 1 else ends
    if model.device.type != "meta":
        with quiet():
            inner.save_pretrained(folder, max_shard_size=inner.num_parameters() * 8)
        return
    inner.config.save_pretrained(folder)
    inner.generation_config.save_pretrained(folder)


@torch.no_grad()
def with_rows_of_class(model: AnyModel, known: int, tokens: int) -> AnyModel:
    """Returns the model with `tokens` rows or more: new rows are the mean of the first `known`."""
    inner = model.inner
    size = max(model.config.vocab_size, tokens)
    if size > model.config.vocab_size:
        inner.resize_token_embeddings(size, mean_resizing=False)
    weights = {inner.get_input_embeddings().weight, inner.get_output_embeddings().weight}
    for weight in weights:  # one, if they are tied
        weight[known:tokens] = weight[:known].mean(dim=0)
    return AnyModel(model.config.changed(vocab_size=size), inner)
