"""Hugging Face: conversion, weight files, model cards, the Hub, other toolkits' checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class DifferentModel(ValueError):
    """A `config.json` describes a model that the module in `models/` does not compute."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The differences between `transformers`' files and an architecture in `models/`.

    It is the `CONVERSION` in `hf/NAME.py`. Names of tensors are from `models/`, without HF's
    `prefix`: full names in `padded`, ends of names in the others.
    """

    name: str  # messages and model cards show it
    model_class: str  # the class of transformers
    prefix: str  # HF's names begin with it, except the head's
    padded: tuple[str, ...]  # have one row per token: the token embedding first, then the head
    transposed: tuple[str, ...] = ()  # HF's `Conv1D` stores the transpose of a Linear weight
    biased: tuple[str, ...] = ()  # have a bias in HF, zero if the model has none
    ignored: tuple[str, ...] = ()  # buffers in old files
    fields: Mapping[str, str]  # HF's field of `config.json` -> the config's in `models/`
    supported: Mapping[str, tuple]  # HF's option, if its class has it -> values with equal models
    # (HF's values, dropout) -> the config's other fields. Raises `DifferentModel` if `models/`
    # computes another model.
    read: Callable[[Mapping[str, Any], float], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]  # the config -> HF's other fields
