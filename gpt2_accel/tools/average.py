"""Averages the weights of a run's last checkpoints (Izmailov et al., 2018, arXiv:1803.05407)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from gpt2_accel.hf.convert import from_pretrained
from gpt2_accel.hf.safetensors_files import is_adapter, read_tensors, weight_files
from gpt2_accel.hf.tensors import to_hf
from gpt2_accel.models import LanguageModel, convert_parameters


@torch.no_grad()
def average(checkpoints: Sequence[Path]) -> LanguageModel:
    """Returns the model whose weights are the mean of those of a run's checkpoints, on the CPU.

    Each mean is computed in fp64 and rounded to the dtype in the files. They are memory-mapped: in memory are one model and one
    tensor. Raises `ValueError` for an adapter, and the errors of `from_pretrained`.
    """
    last = checkpoints[-1]
    if is_adapter(last):
        raise ValueError(
            f"{last} is an adapter, and the mean of adapters is not that of their models: leave out --average"
        )
    model = from_pretrained(last)
    own = to_hf(model)  # views of the weights
    dtype = model.dtype
    for group in zip(*(read_tensors(weight_files(path)) for path in checkpoints), strict=True):
        name, tensor = group[0]
        total = torch.zeros(tensor.shape, device="cpu", dtype=torch.float64)
        for _, tensor in group:
            total += tensor
        dtype = tensor.dtype
        own[name].copy_((total / len(group)).to(dtype))
    convert_parameters(model, dtype)
    return model
