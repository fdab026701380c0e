"""The weights of the modules in `models/` under Hugging Face's names and shapes, both ways.

`hf/NAME.py` knows the tensors of the architecture NAME. Vocabulary padding is not stored, nor is a
tied head.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import torch

from gpt2_accel.hf import Conversion
from gpt2_accel.hf.safetensors_files import SAFETENSORS_DTYPES
from gpt2_accel.models import LanguageModel, ModelConfig, filled
from gpt2_accel.models.any_model import AnyModel

HEAD = "lm_head.weight"


def conversion(architecture: str) -> Conversion:
    """Returns how the files of an architecture in `config.ARCHITECTURES` differ from its model."""
    return import_module(f"gpt2_accel.hf.{architecture}").CONVERSION


def to_hf(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Returns the weights under HF's names and shapes, as views if possible: not all contiguous."""
    state = model.state_dict()
    if isinstance(model, AnyModel):
        return {name.removeprefix("inner."): tensor for name, tensor in state.items()}
    table = conversion(model.config.architecture)
    tensors = {}
    for name, tensor in state.items():
        if name in table.padded:
            tensor = tensor[: model.config.vocab_size]
        if name.endswith(table.transposed):
            tensor = tensor.t()
        key = name if name == HEAD else table.prefix + name
        tensors[key] = tensor
        if name.endswith(table.biased) and name.removesuffix("weight") + "bias" not in state:
            tensors[key.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[-1])
    return tensors


def from_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: ModelConfig,
    source: str = "the state dict",
) -> LanguageModel:
    """Returns a model of this config with HF's weights, in fp32 on the CPU, in its own memory.

    Arguments and errors are those of `load_hf`.
    """
    with torch.device("meta"):
        model = config.build()
    found = fitting(model, tensors, source)  # before memory is taken for a wrong config
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    model = filled(model, zeros)
    load_hf(model, found.items(), source)
    return model


def fitting(
    model: LanguageModel, tensors: Iterable[tuple[str, torch.Tensor]], source: str
) -> dict[str, torch.Tensor]:
    """Returns HF's weights by their full names.

    Raises `ValueError` for a missing, unknown or misshapen tensor.
    """
    table = conversion(model.config.architecture)
    own = to_hf(model)
    names = model.state_dict().keys()
    needed = {key for key in own if key.removeprefix(table.prefix) in names}
    found = {}
    for key, tensor in tensors:
        name = key.removeprefix(table.prefix)
        if not name.endswith(table.ignored):
            found[name if name == HEAD else table.prefix + name] = tensor
    unknown = found.keys() - own.keys() - {HEAD}  # a tied head may be there
    wrong = (needed - found.keys()) | unknown
    if wrong:
        raise ValueError(
            f"{source} and its config are of different models: only one of them has {min(wrong)}"
        )
    for key, tensor in found.items():
        shape = own[key].shape if key in own else tensor.shape
        if tensor.shape != shape or tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(
                f"{key} in {source} does not fit its config: it is {tuple(tensor.shape)}, "
                f"{tensor.dtype}, expected {tuple(shape)}, fp32, fp16 or bf16"
            )
    return found


@torch.no_grad()
def load_hf(model: LanguageModel, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    """Copies HF's weights into a model. `source` names the file in errors. HF's prefix may be
    absent from the names.

    Raises `ValueError` for a missing, unknown or misshapen tensor, a head that differs from the
    token embedding it should be tied to, or a nonzero bias if the model has none.
    """
    table = conversion(model.config.architecture)
    own = to_hf(model)  # views of the weights, and zeros for the biases that it does not have
    found = fitting(model, tensors, source)
    head = None if HEAD in own else found.pop(HEAD, None)
    names = model.state_dict().keys()
    for key, tensor in found.items():
        if key.removeprefix(table.prefix) not in names and tensor.any():
            raise ValueError(f'{source} says "bias": false, but {key} is not zero')
        own[key].copy_(tensor)
    embedding = own[table.prefix + table.padded[0]]
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
