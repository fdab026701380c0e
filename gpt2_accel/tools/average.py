"""Averages the weights of a run's last checkpoints (Izmailov et al., 2018, arXiv:1803.05407)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from gpt2_accel.hf.convert import from_pretrained
from gpt2_accel.hf.safetensors_files import is_adapter, read_tensors, weight_files
from gpt2_accel.models import LanguageModel, convert_parameters


@torch.no_grad()
def average(checkpoints: Sequence[Path]) -> LanguageModel:
    """Returns the model with the mean weights of a run's checkpoints, on the CPU.

    Computes each mean in fp64 and rounds it to the dtype of the files. Two models and the fp64 sums
    are in memory. Raises `ValueError` for an adapter, and the errors of `from_pretrained`.
    """
    last = checkpoints[-1]
    if is_adapter(last):
        raise ValueError(
            f"{last} is an adapter, and a mean of adapters is not the mean of their models: give a "
            "run that trains all weights"
        )
    model = from_pretrained(last)
    sums = {name: weight.cpu().double() for name, weight in model.named_parameters()}
    for path in checkpoints[:-1]:
        for name, weight in from_pretrained(path).named_parameters():
            sums[name] += weight
    _, tensor = next(read_tensors(weight_files(last)))
    convert_parameters(model, tensor.dtype)
    for name, weight in model.named_parameters():
        weight.copy_(sums[name] / len(checkpoints))
    return model
