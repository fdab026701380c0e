"""Converts weights between `models/` and Hugging Face: `to_hf` and `from_hf`.

`hf/NAME.py` describes the tensors of the architecture NAME. Files hold neither the padding rows of
the vocabulary nor a tied head.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import torch

from gpt2_accel.hf import Conversion
from gpt2_accel.hf.safetensors_files import WEIGHT_DTYPES
from gpt2_accel.models import LanguageModel, ModelConfig, filled
from gpt2_accel.models.any_model import AnyModel

HEAD = "lm_head.weight"


def conversion(architecture: str) -> Conversion:
    """Returns how the files of an architecture in `config.ARCHITECTURES` differ from its model."""
    return import_module(f"gpt2_accel.hf.{architecture}").CONVERSION


def hf_name(name: str, table: Conversion) -> str:
    """Returns HF's name of the tensor `name` in `models/`."""
    if name == HEAD:
        return name
    return table.prefix + name


def to_hf(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Returns the weights under HF's names and shapes: views, some of them not contiguous.

    Biases that HF stores and the model does not have are new zeros.
    """
    state = model.state_dict()
    if isinstance(model, AnyModel):
        return {name.removeprefix("inner."): tensor for name, tensor in state.items()}
    table = conversion(model.config.architecture)
    tensors = {}
    for name, tensor in state.items():
        if name in table.padded:
            tensor = tensor[: model.config.vocab_size]  # drops the padding rows
        if name.endswith(table.transposed):
            tensor = tensor.t()
        key = hf_name(name, table)
        tensors[key] = tensor
        if name.endswith(table.biased) and name.removesuffix("weight") + "bias" not in state:
            tensors[key.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[-1])
    return tensors


def from_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: ModelConfig,
    source: str,
) -> LanguageModel:
    """Returns a model of this config with a copy of HF's weights, in fp32 on the CPU.

    `tensors` are pairs of name and weight (fp32, fp16 or bf16), with or without HF's prefix.
    `source` names them in errors. Raises `ValueError` if they do not fit the config: see `load_hf`.
    """
    with torch.device("meta"):
        model = config.build()
    weights = validated(model, tensors, source)  # a wrong config fails before memory is taken
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    model = filled(model, zeros)
    load_hf(model, weights.items(), source)
    return model


def validated(
    model: LanguageModel, tensors: Iterable[tuple[str, torch.Tensor]], source: str
) -> dict[str, torch.Tensor]:
    """Returns HF's weights by their names with the prefix, if they fit the model.

    Raises `ValueError` for a missing, unknown or misshapen tensor, or an unsupported dtype.
    """
    table = conversion(model.config.architecture)
    expected = to_hf(model)
    names = model.state_dict().keys()
    required = {key for key in expected if key.removeprefix(table.prefix) in names}
    weights = {}
    for key, tensor in tensors:
        name = key.removeprefix(table.prefix)
        if not name.endswith(table.ignored):
            weights[hf_name(name, table)] = tensor
    if HEAD in weights and HEAD not in expected:  # a tied head may be stored
        weights.setdefault(table.prefix + table.padded[0], weights[HEAD])
    missing = required - weights.keys()
    if missing:
        raise ValueError(
            f"{source} does not have {min(missing)}, which its config needs: give the weights and "
            "the config of the same model"
        )
    unknown = weights.keys() - expected.keys() - {HEAD}
    if unknown:
        raise ValueError(
            f"{source} has {min(unknown)}, which its config does not describe: give the weights "
            "and the config of the same model"
        )
    for key, tensor in weights.items():
        # A tied head is not in `expected`: `load_hf` compares it with the embedding.
        shape = expected.get(key, tensor).shape
        if tensor.shape != shape or tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{key} in {source} does not fit its config: it is {tuple(tensor.shape)}, "
                f"{tensor.dtype}, expected {tuple(shape)}, fp32, fp16 or bf16"
            )
    return weights


@torch.no_grad()
def load_hf(model: LanguageModel, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    """Copies HF's weights into a model.

    `tensors` are pairs of name and weight, with or without HF's prefix. `source` names them in
    errors. Raises `ValueError` for a missing, unknown or misshapen tensor, an unsupported dtype, a
    head that differs from the token embedding it should be tied to, or a nonzero bias if the model
    has none.
    """
    table = conversion(model.config.architecture)
    targets = to_hf(model)
    weights = validated(model, tensors, source)
    head = None if HEAD in targets else weights.pop(HEAD, None)
    names = model.state_dict().keys()
    for key, tensor in weights.items():
        if key.removeprefix(table.prefix) not in names and tensor.any():
            raise ValueError(
                f'the config of {source} has "bias": false, but {key} is not zero: set it to true'
            )
        targets[key].copy_(tensor)  # a view, so this writes the model's weight
    embedding = targets[table.prefix + table.padded[0]]
    if head is not None and not torch.equal(head.float(), embedding.float()):
        raise ValueError(f"{source} has an lm_head that is not tied to the token embedding")


def check_finite(model: LanguageModel, source: str | Path) -> None:
    """Raises `ValueError` if a weight of the model, called `source`, is NaN or infinite."""
    for key, tensor in to_hf(model).items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{key} of {source} holds NaN or infinite weights: take another, such as an "
                "earlier checkpoint"
            )
