"""Opens and writes Hugging Face model directories: weights, config, tokenizer.

A saved directory is an HF model: `AutoModelForCausalLM.from_pretrained` opens it. `hf/tensors.py`
converts the weights.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name
from pydoc import ErrorDuringImport, importfile
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from gpt2_accel import models
from gpt2_accel.config import ARCHITECTURES, TrainConfig
from gpt2_accel.hf import DifferentModel, hub
from gpt2_accel.hf.any_model import (
    any_config,
    open_any,
    read_generation,
    with_rows_of_class,
    write_any,
)
from gpt2_accel.hf.lora import base_of, load_lora, merged, opening_lines
from gpt2_accel.hf.model_card import Training, model_card
from gpt2_accel.hf.safetensors_files import (
    ADAPTER,
    WEIGHTS,
    is_adapter,
    read_tensors,
    weight_files,
)
from gpt2_accel.hf.tensors import conversion, from_hf, load_hf, to_hf
from gpt2_accel.models import LanguageModel, ModelConfig, check_loaded, config_class
from gpt2_accel.models.any_model import AnyConfig, AnyModel
from gpt2_accel.runtime.files import atomic_files, read_json, sentence, write_json
from gpt2_accel.tokenizer import (
    GPT2_VOCAB_SIZE,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
    text_ends,
    text_start,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

LORA = "a model for an adapter of peft"
CUSTOM = "gpt2_accel_custom"  # the `model_type` of a model that transformers does not have


def save_pretrained(
    model: LanguageModel,
    directory: str | Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    training: Training | None = None,
    name: str | None = None,
    custom: str = "",
) -> None:
    """Writes an HF model directory: weights, config, generation config, card, tokenizer if given.

    A model that `transformers` does not have is written under its own names; `custom` is the
    reason, for the card. For a model on the meta device all files but the weights are written.

    `training` is the card's section about the training, `name` the model's name in it, by default
    the directory. The files have the dtype of the weights. Each file is replaced atomically, so a
    directory in use never holds an incomplete file. A transposed matrix is copied in memory. Raises
    `ValueError` if the tokenizer has more tokens than the model has rows, or does not encode
    equally when `AutoTokenizer` loads it.
    """
    config = model.config
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size, name or directory)
    ids = special_ids(tokenizer, config.vocab_size)
    ends = [] if tokenizer is None else text_ends(tokenizer)
    generation = generation_config(model, ids, ends)
    with atomic_files(directory) as folder:
        if isinstance(model, AnyModel):
            write_any(model, folder, ids, ends, generation)
        else:
            write_own(model, folder, ids, generation, custom)
        card = model_card(
            name or str(directory),
            describe(config),
            training,
            CUSTOM if custom else config.architecture,
            chat=tokenizer is not None and bool(tokenizer.chat_template),
            adapter=opening_lines(model) if isinstance(model, AnyModel) and model.adapter else "",
            custom=f"{custom}. Its class is `{class_name(type(model))}`" if custom else "",
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        if tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.model_max_length = config.n_positions
            save_tokenizer(tokenizer, folder, directory)
            tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.json, merges.txt
        if custom:  # comes last: AutoTokenizer warns of such a config
            values = {"model_type": CUSTOM, "class": class_name(type(model))}
            write_json(folder / "config.json", values | {"config": asdict(config)} | ids)
        Path(directory, hub.MODEL_MANIFEST).unlink(missing_ok=True)  # it lists the old files
    for old in Path(directory).glob("model*.safetensors*"):
        if old.name != WEIGHTS:  # the shards of an earlier model, and their index
            old.unlink()


def generation_config(
    model: LanguageModel, ids: dict[str, int | None], ends: list[int]
) -> "GenerationConfig":
    """Returns the generation config of a model's base, or a new one, with the special tokens `ids`
    and the tokens that end a text."""
    from transformers import GenerationConfig

    generation = copy.copy(getattr(model, "generation", None)) or GenerationConfig(
        # A bare pipeline call asks for 256, and fails if there are fewer positions.
        max_new_tokens=max(1, min(256, model.config.n_positions // 2)),
        do_sample=True,
        top_k=min(50, model.config.vocab_size),
    )
    generation.update(**({"pad_token_id": ids["eos_token_id"]} | ids))
    if len(ends) > 1:
        generation.eos_token_id = ends
    return generation


def write_own(
    model: LanguageModel,
    folder: Path,
    ids: Mapping[str, int | None],
    generation: "GenerationConfig",
    custom: str,
) -> None:
    """Writes weights, generation config and, unless the model is `custom`, config of a model in
    `models/`."""
    generation.save_pretrained(folder)
    tensors = model.state_dict()
    if not custom:
        hf_config(model.config, ids, model.dtype).save_pretrained(folder)
        tensors = to_hf(model)
    if model.device.type != "meta":
        packed = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(packed, folder / WEIGHTS, {"format": "pt"})


def special_ids(
    tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int
) -> dict[str, int | None]:
    """Returns the special tokens of a `config.json`.

    Without a tokenizer, OpenAI's vocabulary still has its end of a text.
    """
    if tokenizer is None:
        end = GPT2_VOCAB_SIZE - 1 if vocab_size == GPT2_VOCAB_SIZE else None
        return {"bos_token_id": end, "eos_token_id": end}
    begin = next(iter(text_start(tokenizer)), None)
    end = next(iter(text_ends(tokenizer)), None)
    padding = tokenizer.pad_token_id
    ids = {"bos_token_id": begin, "eos_token_id": end}
    if padding not in (None, end):
        ids["pad_token_id"] = padding
    return ids


def hf_config(
    config: ModelConfig, special_ids: Mapping[str, int | None], dtype: torch.dtype | None = None
) -> "PreTrainedConfig":
    """Returns HF's config of the same model, with `special_ids` such as `eos_token_id`."""
    from transformers import CONFIG_MAPPING

    table = conversion(config.architecture)
    sizes = {theirs: getattr(config, ours) for theirs, ours in table.fields.items()}
    # Without an id NanoChat's class takes token 1 for padding, and does not train its embedding.
    ids = {"pad_token_id": None} | dict(special_ids)
    kind: Any = CONFIG_MAPPING[config.architecture]
    return kind(
        **sizes,
        **table.write(config),
        **ids,
        architectures=[table.model_class],
        dtype=dtype,
    )


def describe(config: ModelConfig) -> str:
    """Describes the model in one sentence, for its card."""
    kind = config.architecture
    if not isinstance(config, AnyConfig):
        kind = conversion(kind).name
    return (
        f"A {kind} of {config.parameter_count:,} parameters: {config.n_layer} layers, "
        f"{config.n_head} heads, {config.n_embd} wide, {config.n_positions:,} positions, a "
        f"vocabulary of {config.vocab_size:,}."
    )


def from_pretrained(
    name: str | Path,
    dropout: float = 0.0,
    model_class: str | None = None,
    attention: str | None = None,
    *,
    reason: str | None = None,
    merge: bool = True,
    base: str | Path | None = None,
) -> LanguageModel:
    """Loads a causal language model, in fp32 on the CPU, in training mode.

    Returns the module in `models/` if it computes the same, else the class of `transformers`.
    `name` is a directory or a Hub id, `USER/NAME` or `USER/NAME@REVISION`. `dropout` is a training
    setting of GPT-2; the value in the file is ignored. A model that `transformers` does not have
    needs its `model_class`, see `load_class`, unless its class is one of `models/`. `attention`, an
    `attn_implementation`, selects the class of `transformers`, and so does a `reason`, which is
    printed. An adapter of peft is opened with its base model, or `base` in place of it, and merged
    into it unless `merge` is False.

    Raises `FileNotFoundError` if there is no such directory or Hub repository, `ValueError` if it
    is damaged or `transformers` has no such text model; the message names the file or tensor. Files
    are never run as code.
    """
    directory = local_directory(name)
    if model_class is None and is_custom(directory):  # a class of this package that was edited
        saved = str(config_values(directory).get("class"))
        model_class = saved if saved.startswith(f"{models.__name__}.") else None
    if model_class is not None:
        kind = load_class(model_class)
        model = kind(kind.config_class(**read_custom(directory, kind)))
        load_weights(model, directory)
        return model
    if is_adapter(directory):
        base = local_directory(base or base_of(directory))
        model = from_pretrained(base, attention=attention, reason=LORA)
        assert isinstance(model, AnyModel)
        if (directory / "tokenizer.json").is_file():
            rows = len(load_tokenizer(directory))
            model = with_rows_of_class(model, model.config.vocab_size, rows)
        load_lora(model, directory, base)
        return merged(model) if merge else model
    config = read_config(directory, dropout, attention, reason)
    files = weight_files(directory)
    if isinstance(config, AnyConfig):
        return open_any(directory, config)
    model = from_hf(read_tensors(files), config, str(directory))
    model.generation = read_generation(directory)
    return model


def load_weights(model: LanguageModel, directory: Path) -> None:
    """Loads the weights of a directory into a model on the CPU.

    Raises `ValueError` if they do not fit the model.
    """
    tensors = read_tensors(weight_files(directory))
    custom = is_custom(directory)
    saved = read_custom(directory, type(model)) if custom else asdict(read_config(directory))
    for name, value in saved.items():
        present = getattr(model.config, name, value)
        if (
            name != "dropout" and type(present) is type(value) and present != value
        ):  # JSON has no tuples
            raise ValueError(
                f"{directory} has {name} = {value}: build the model with it, not {present}"
            )
    if not custom:
        load_hf(model, tensors, str(directory))
        return
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise ValueError(f"{directory} does not fit {class_name(type(model))}: {error}") from error


def class_name(kind: type) -> str:
    """Returns the name of a class as `MODULE:CLASS`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def load_name(name: str, expected: str) -> Any:
    """Imports what the user names, `FILE.py:NAME` or `MODULE:NAME`.

    The file can import other files of its folder. Raises `ValueError` if the import fails.
    """
    place, _, own = name.rpartition(":")
    known = sys.modules.copy()
    sys.path.append(f"{Path(place).absolute().parent}")  # last: the folder may have a queue.py
    try:
        return getattr(importfile(place), own) if place.endswith(".py") else resolve_name(name)
    except (ImportError, AttributeError, OSError, ValueError, ErrorDuringImport) as error:
        raise ValueError(f"{name} is not {expected} ({error})") from error
    finally:
        sys.modules.update(known)  # the file may be called json.py


def load_class(name: str) -> type[LanguageModel]:
    """Imports the class of a model that the user names, `FILE.py:CLASS` or `MODULE:CLASS`.

    Raises `ValueError` if there is no such class, or if it is not a `LanguageModel`.
    """
    model_class = load_name(name, "a class: give FILE.py:CLASS")
    if not (isinstance(model_class, type) and issubclass(model_class, LanguageModel)):
        raise ValueError(f"{name} is not a subclass of gpt2_accel.models.LanguageModel")
    return model_class


def config_values(directory: Path) -> dict[str, Any]:
    """Returns the fields of a `config.json`.

    Raises `FileNotFoundError` if there is none, `ValueError` if it is damaged.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {directory} is not a Hugging Face model")
    try:
        return dict(read_json(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def is_custom(directory: Path) -> bool:
    """Whether a directory holds a model that `transformers` does not have."""
    return not is_adapter(directory) and config_values(directory).get("model_type") == CUSTOM


def read_custom(directory: Path, kind: type[LanguageModel]) -> dict[str, Any]:
    """Returns the config's fields of a model that `transformers` does not have.

    Raises `ValueError` if the directory holds a model of another class than `kind`. The class in
    the file is not imported.
    """
    values = config_values(directory)
    if values.get("model_type") != CUSTOM:
        raise ValueError(f"{directory} holds a model of transformers: leave out --model_class")
    saved = values["class"]
    if saved.rpartition(":")[2] != kind.__qualname__:
        raise ValueError(f"{directory} holds {saved}, not {class_name(kind)}: give its class")
    return values["config"]


def local_directory(name: str | Path, patterns: Sequence[str] = hub.MODEL_FILES) -> Path:
    """Returns the directory `name`, or the local copy of a Hub repository's files of `patterns`."""
    return Path(name) if Path(name).is_dir() else hub.download(str(name), patterns)


def model_tokenizer(name: str | Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a model, an HF directory or Hub id, if the model can be trained.

    Raises `ValueError` if it cannot, `FileNotFoundError` if its tokenizer or weights are missing.
    """
    directory = local_directory(name)
    read_config(directory)
    weight_files(directory)
    return load_tokenizer(directory)


def read_config(
    name: str | Path,
    dropout: float = 0.0,
    attention: str | None = None,
    reason: str | None = None,
) -> ModelConfig:
    """Reads the shape in the `config.json` of a directory or Hub repository.

    Returns the config of a module in `models/` if that computes the same, else an `AnyConfig`.
    `attention` and `reason` as in `from_pretrained`. An adapter has the shape of its base model.
    Raises `ValueError` for a model that cannot be trained, see `any_config`.
    """
    directory = local_directory(name, ("config.json", ADAPTER))
    if is_adapter(directory):
        return read_config(base_of(directory), attention=attention, reason=LORA)
    values = config_values(directory)
    try:
        note = reason or (attention and f"--attn_implementation {attention}")
        if not note:
            try:
                return _own_config(values, dropout)
            except DifferentModel as different:
                note = str(different)
        if dropout:
            raise ValueError("the model takes its dropout rates from config.json: give --dropout 0")
        return any_config(values, note, attention)
    except Exception as error:  # HF's classes raise several types
        raise ValueError(f"{directory / 'config.json'}: {sentence(error)}") from error


def _own_config(values: Mapping[str, Any], dropout: float) -> ModelConfig:
    """Converts the values of a `config.json`.

    Raises `DifferentModel` if `models/` has no equal module.
    """
    from transformers import CONFIG_MAPPING

    model_type = values.get("model_type")
    if model_type == CUSTOM:
        raise ValueError(
            f"it is a model of the class {values.get('class')}, which transformers does not have: "
            "name its code by --model_class FILE.py:CLASS"
        )
    file = values.get("transformers_weights")
    if file:
        raise ValueError(f"its weights are in {file!r}: save the model again, in model.safetensors")
    if model_type not in ARCHITECTURES:
        raise DifferentModel(f"models/ has no {model_type}")
    table = conversion(model_type)
    # HF's class checks types, reads old spellings and adds missing fields.
    config = CONFIG_MAPPING[model_type].from_dict(dict(values))
    channels = config.hidden_size // (config.num_attention_heads or 1)
    values = {"bias": True, "head_dim": channels} | config.to_dict()
    for key, allowed in table.supported.items():
        if key in values and values[key] not in allowed:
            raise DifferentModel(f"its {key} is {values[key]!r}")
    sizes = {ours: values[theirs] for theirs, ours in table.fields.items()}
    return config_class(model_type)(**sizes, **table.read(values, dropout))


def configured_shape(settings: TrainConfig, vocab_size: int) -> ModelConfig:
    """Returns the shape of a new model by the `architecture` of the settings.

    That is a name in `ARCHITECTURES`, or the directory or Hub id of a model. Raises `ValueError`
    for settings that the architecture does not have.
    """
    name = settings.architecture
    if name is None or name in ARCHITECTURES:
        if settings.attn_implementation:
            raise ValueError(
                "--attn_implementation is for a class of transformers: name a model by "
                "--init_from or a config.json by --architecture, or leave it out"
            )
        return config_class(name).from_settings(settings, vocab_size)
    shape = read_config(name, settings.dropout, settings.attn_implementation)
    check_loaded(settings, shape)
    if isinstance(shape, AnyConfig):
        return shape.changed(vocab_size=vocab_size)
    return replace(shape, vocab_size=vocab_size)
