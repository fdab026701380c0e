"""Low-rank adaptation (LoRA; Hu et al., 2021, arXiv:2106.09685) by `peft`, on a class of
`transformers`.

An adapter's directory has `peft`'s files: `adapter_config.json`, which names the base model, and
`adapter_model.safetensors`. The base model does not change.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from gpt2_accel.config import TrainConfig
from gpt2_accel.hf.safetensors_files import ADAPTER
from gpt2_accel.models import LanguageModel, skeleton
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.runtime.files import parse_json

NEEDS_MODEL = "--lora trains an adapter of a published or trained model: name it by --init_from"
# Experts' parameters whose names begin so get no adapter.
ROUTERS = ("gate.", "router.")


def require_peft() -> None:
    """Raises `ValueError` if peft is not installed."""
    if find_spec("peft") is None:
        raise ValueError("LoRA needs peft: pip install 'peft>=0.20'")


def base_of(directory: Path) -> str:
    """Returns the base model of an adapter: a directory, or `USER/NAME@REVISION`."""
    values = parse_json((directory / ADAPTER).read_text(encoding="utf-8"))
    name = values["base_model_name_or_path"]
    revision = values.get("revision")
    return f"{name}@{revision}" if revision else name


def add_lora(model: AnyModel, settings: TrainConfig, rows: Sequence[int], base: str) -> None:
    """Adds a new adapter to the linear layers and experts, without head and routers.

    From now on only the adapter is trained, and the rows of the new tokens `rows` in the embedding
    and the head. `base` is the model as `base_of` returns it. Raises peft's errors.
    """
    require_peft()
    import peft

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
    model.adapter = (peft.get_peft_model(inner, config),)
    config.base_model_name_or_path, _, revision = base.partition("@")
    config.revision = revision or None


def load_lora(model: AnyModel, directory: Path) -> None:
    """Adds the adapter of a directory to its base model, to be trained on."""
    require_peft()
    import peft

    adapter = peft.PeftModel.from_pretrained(
        model.inner, directory, is_trainable=True, torch_device="cpu"
    )
    model.adapter = (adapter,)


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

    The given model cannot be used afterwards.
    """
    inner = model.adapter[0].float().merge_and_unload()
    return AnyModel(model.config, inner.requires_grad_())


def write_adapter(model: AnyModel, folder: Path) -> None:
    """Writes the adapter's directory; nothing for a model on the meta device."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        # The embedding of a larger vocabulary is not part of it.
        model.adapter[0].save_pretrained(folder, save_embedding_layers=False)


def opening_lines(model: AnyModel) -> str:
    """Returns the code that opens the adapter in the folder `name`, for its card."""
    config = model.adapter[0].peft_config["default"]
    base = f"{config.base_model_name_or_path!r}, revision={config.revision!r}"
    lines = [f"base = AutoModelForCausalLM.from_pretrained({base})"]
    if config.trainable_token_indices:  # rows of tokens that the base may not have
        lines.append(f"base.resize_token_embeddings({model.config.vocab_size})")
    return "\n".join([*lines, "model = PeftModel.from_pretrained(base, name)"])
