"""Hugging Face: conversion, weight files, model cards, the Hub, other toolkits' checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class DifferentModel(ValueError):
    """A `config.json` describes a model that the module in `models/` does not compute."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The differences between `transformers`' files and an architecture in `models/`.

    It is the `CONVERSION` in `hf/NAME.py`. Tensors are given by the ends of their names in
    `models/`, without HF's `prefix`.
    """

    name: str  # in messages and model cards
    model_class: str  # in transformers
    prefix: str  # of all tensors but that of the head
    padded: tuple[str, ...]  # one row for each token
    transposed: tuple[str, ...] = ()  # HF's `Conv1D` stores the transpose of a Linear weight
    biased: tuple[str, ...] = ()  # have a bias in HF, zero if the model has none
    ignored: tuple[str, ...] = ()  # buffers in old files
    fields: Mapping[str, str]  # HF's field of `config.json` -> the config's in `models/`
    supported: Mapping[str, tuple]  # HF's option -> the values with equal models
    # (HF's values, dropout) -> the config's other fields. Raises `DifferentModel` if `models/`
    # computes another model.
    read: Callable[[Mapping[str, Any], float], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]  # the config -> HF's other fields
