"""Averages the weights of models of one shape.

The models are checkpoints of one run (Izmailov et al., 2018, arXiv:1803.05407), or several fine-tunings of one model, a
model soup (Wortsman et al., 2022, arXiv:2203.05482).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpt2_accel.hf.convert import build, conversion, find_model, own_tensors, padded
from gpt2_accel.hf.safetensors_files import read_tensors
from gpt2_accel.models import LanguageModel, ModelConfig
from gpt2_accel.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def average(directories: Sequence[Path]) -> LanguageModel:
    """Returns the model whose weights are the mean of those of HF model directories, on CPU.

    Computes each mean in fp64 and stores it in the dtype of the first directory's tensor. The files are memory-mapped:
    besides the result it keeps one tensor in memory.

    Raises `ValueError` if the configs differ or a weight is NaN or infinite, and the errors of `from_pretrained`.
    """
    models = [(directory, *find_model(directory)) for directory in directories]
    first, config, _ = models[0]
    for directory, other, _ in models:
        if other != config:
            raise ValueError(
                f"{directory} is a model of another shape than {first} ({first_difference(other, config)}): "
                "average models of one shape"
            )
    weights = [
        (directory, own_tensors(read_tensors(files), config, str(directory)))
        for directory, _, files in models
    ]
    return build(config, padded(means(weights), config))


def common_tokenizer(directories: Sequence[Path]) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of the first directory. Raises `ValueError` if another has a different one, and the errors of
    `load_tokenizer`."""
    first, *others = (load_tokenizer(directory) for directory in directories)
    for directory, other in zip(directories[1:], others, strict=True):
        if fingerprint(other) != fingerprint(first):
            raise ValueError(
                f"{directory} has another tokenizer than {directories[0]}: average models of one tokenizer"
            )
    return first


def first_difference(config: ModelConfig, other: ModelConfig) -> str:
    """Names the first setting in which two configs differ, with both values."""
    if type(config) is not type(other):
        return f"{conversion(config).NAME}, not {conversion(other).NAME}"
    values = asdict(other)
    name, value = next((n, v) for n, v in asdict(config).items() if v != values[n])
    return f"{name} {value}, not {values[name]}"


def means(
    weights: Sequence[tuple[Path, Mapping[str, torch.Tensor]]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the mean of each tensor. `weights` holds the tensors of each directory, by name.

    Raises `ValueError` if a weight is NaN or infinite.
    """
    for name, first in weights[0][1].items():
        # -0.0 + x is x, also if x is -0.0.
        total = torch.full(first.shape, -0.0, device="cpu", dtype=torch.float64)
        for directory, tensors in weights:
            total += tensors[name]
            if not total.sum().isfinite():
                raise ValueError(
                    f"{name} in {directory} holds NaN or infinite weights: leave this model out"
                )
        yield name, (total / len(weights)).to(first.dtype)
