"""Hugging Face's Qwen3 and `models/qwen3.py`: as Llama, but for the options of `config.json`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt2_accel.hf import DifferentModel, llama
from gpt2_accel.models.qwen3 import Qwen3Config


def read(values: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    """Returns the fields that `Conversion.fields` cannot give."""
    if set(values["layer_types"]) - {"full_attention"}:
        raise DifferentModel("it has layers with a sliding window")
    return llama.read(values, dropout)


def gguf(config: Qwen3Config) -> dict[str, Any]:
    """Returns llama.cpp's metadata."""
    if config.rope_scaling is not None:
        raise ValueError(
            "llama.cpp does not scale the rotary positions of a Qwen3: use another server (docs/hub.md)"
        )
    return llama.gguf(config)


CONVERSION = replace(
    llama.CONVERSION,
    name="Qwen3",
    model_class="Qwen3ForCausalLM",
    supported={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "use_sliding_window": (False,),
    },
    read=read,
    gguf=gguf,
    gguf_interleaved=(),  # llama.cpp turns the channels of a Qwen3 as HF does
)
