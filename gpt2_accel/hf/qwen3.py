"""Hugging Face's Qwen3 and `models/qwen3.py`: like Llama, except for options of `config.json`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt2_accel.hf import DifferentModel, llama


def read(values: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    """Returns the config's fields that are not in `Conversion.fields`."""
    if set(values["layer_types"]) - {"full_attention"}:
        raise DifferentModel("it has layers with a sliding window")
    return llama.read(values, dropout)


CONVERSION = replace(
    llama.CONVERSION,
    name="Qwen3",
    model_class="Qwen3ForCausalLM",
    read=read,
)
