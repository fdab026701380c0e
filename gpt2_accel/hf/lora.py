"""Low-rank adaptation (LoRA; Hu et al., 2021, arXiv:2106.09685) by `peft`, on a class of
`transformers`.

An adapter's directory has `peft`'s files: `adapter_config.json`, which names the base model, and
`adapter_model.safetensors`. The base model does not change. `adapter_base.json` has a digest of its
weights, so that an adapter is not added to another model.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from gpt2_accel.config import TrainConfig
from gpt2_accel.hf.safetensors_files import (
    ADAPTER,
    BASE_RECORD,
    read_tensors,
    weight_files,
    weights_digest,
)
from gpt2_accel.models import LanguageModel, skeleton
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.runtime.files import sentence, write_json
from gpt2_accel.runtime.options import load_saved

NEEDS_MODEL = "--lora trains an adapter of a published or trained model: name it by --init_from"
# Experts' parameters whose names begin so get no adapter.
ROUTERS = ("gate.", "router.")


def base_of(directory: Path) -> str:
    """Returns the base model of an adapter: a directory, or `USER/NAME@REVISION`.

    Raises `ValueError` if the config is damaged or names no base, `FileNotFoundError` if the base
    has moved.
    """
    config = directory / ADAPTER
    values = load_saved(config)
    name = str(values.get("base_model_name_or_path") or "")
    if not name:
        raise ValueError(f"{config} names no base model: save or download the adapter again")
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise FileNotFoundError(
            f"{directory} is an adapter of {name}, which does not exist: put it back, name its new "
            f"place by --base, or write it as base_model_name_or_path into {config}"
        )
    revision = values.get("revision")
    return f"{name}@{revision}" if revision else name


def add_lora(
    model: AnyModel,
    settings: TrainConfig,
    rows: Sequence[int],
    base: str,
    digest: str = "",
) -> None:
    """Adds a new adapter to the linear layers and experts, without head and routers.

    From now on only the adapter is trained, and the rows of the new tokens `rows` in the embedding
    and the head. `base` is the model as `base_of` returns it, with the digest of
    its weights. Raises peft's errors.
    """
    import peft

    # A dense model has no router to exclude, and PEFT reads a name that transformers deprecates.
    warnings.filterwarnings("ignore", ".*(exclude_modules|is_gradient_checkpointing)")
    inner = model.inner
    ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    trained = {name: list(rows) for name, module in inner.named_modules() if module in ends}
    config = peft.LoraConfig(
        r=settings.lora,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
        exclude_modules=r".*(gate|router)",
        trainable_token_indices=trained if rows else None,
        task_type="CAUSAL_LM",
    )
    # Adds the names of the layers and of the experts' parameters to the config.
    empty = skeleton(model)
    assert isinstance(empty, AnyModel)
    peft.get_peft_model(empty.inner, config)
    parameters = config.target_parameters or ()
    config.target_parameters = [n for n in parameters if not n.startswith(ROUTERS)] or None
    model.adapter = (peft.get_peft_model(inner, config), digest)
    config.base_model_name_or_path, _, revision = base.partition("@")
    config.revision = revision or None


def load_lora(model: AnyModel, directory: Path, base: Path) -> None:
    """Adds the adapter of a directory to `model`, its base of the directory `base`, to be trained.

    Prints a line if it does not record the digest of its base, as adapters of peft.
    Raises `ValueError` for another base, and for a damaged adapter: peft would initialise missing
    tensors and ignore unknown ones.
    """
    import peft

    digest = weights_digest(base)
    recorded = load_saved(directory / BASE_RECORD)
    if not recorded:
        print(f"{directory} has no {BASE_RECORD}: {base} may be another model", file=sys.stderr)
    elif recorded.get("weights") != digest:
        raise ValueError(
            f"{base} has other weights than the base of the adapter {directory}: put the original "
            f"back, write its new place as base_model_name_or_path into {ADAPTER}, or remove "
            f"{BASE_RECORD} to use this one"
        )
    saved = {name for name, _ in read_tensors(weight_files(directory))}
    try:
        adapter = peft.PeftModel.from_pretrained(
            model.inner, directory, is_trainable=True, torch_device="cpu"
        )
        expected = peft.get_peft_model_state_dict(adapter, save_embedding_layers=False).keys()
    except Exception as error:  # the library raises several types
        raise ValueError(f"peft cannot open {directory}: {sentence(error)}") from error
    wrong = sorted(expected - saved) or sorted(saved - expected - adapter.state_dict().keys())
    if wrong:
        raise ValueError(
            f"{directory} does not fit its {ADAPTER}: {wrong[0]} is missing, or not part of it"
        )
    model.adapter = (adapter, digest)


def describe_lora(model: AnyModel) -> str:
    """Returns a line with the number of trained parameters."""
    trained, total = model.adapter[0].get_nb_trainable_parameters()
    return f"LoRA trains {trained:,} of {total:,} parameters"


def set_dtype(model: LanguageModel, settings: TrainConfig) -> None:
    """Converts a model to the `dtype` of the settings; with LoRA, not the trained parameters."""
    dtype = getattr(torch, settings.dtype)
    for parameter in model.parameters():
        if not (settings.lora and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)


def merged(model: AnyModel) -> AnyModel:
    """Adds the adapter to the weights, in fp32, and returns the model without it.

    A tied head or embedding that the adapter changes becomes a matrix of its own. The given model
    cannot be used afterwards.
    """
    inner, tied = model.inner, model.head_weight
    ends = inner.get_input_embeddings(), inner.get_output_embeddings()
    if any(hasattr(end, "base_layer") for end in ends):
        for module in inner.modules():
            if module._parameters.get("weight") is tied:
                module.weight = torch.nn.Parameter(tied.detach().clone())
    try:
        inner = model.adapter[0].float().merge_and_unload()
    except Exception as error:  # not every adapter of peft changes weights
        raise ValueError(f"peft cannot merge the adapter: {sentence(error)}") from error
    config = model.config.changed(tie_word_embeddings=inner.config.tie_word_embeddings)
    return AnyModel(config, inner.requires_grad_())


def write_adapter(model: AnyModel, folder: Path) -> None:
    """Writes the adapter's directory; nothing for a model on the meta device."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        # The embedding of a larger vocabulary is not part of it.
        adapter, digest = model.adapter
        adapter.save_pretrained(folder, save_embedding_layers=False)
        if digest:
            write_json(folder / BASE_RECORD, {"weights": digest})


def opening_lines(model: AnyModel) -> str:
    """Returns the code that opens the adapter in the folder `name`, for its card."""
    config = model.adapter[0].peft_config["default"]
    base = f"{config.base_model_name_or_path!r}, revision={config.revision!r}"
    lines = [f"base = AutoModelForCausalLM.from_pretrained({base})"]
    if config.trainable_token_indices:  # rows of tokens that the base may not have
        lines.append(f"base.resize_token_embeddings({model.config.vocab_size})")
    return "\n".join([*lines, "model = PeftModel.from_pretrained(base, name)"])
