"""Hugging Face's Qwen3 and `models/qwen3.py`: `config.json`, both ways, and llama.cpp's tensors and metadata.

HF's tensors are as Llama's.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gpt2_accel.hf import llama
from gpt2_accel.hf.llama import PADDED, PREFIX, gguf_metadata, own_tensor, to_hf
from gpt2_accel.models.qwen3 import Qwen3Config

if TYPE_CHECKING:
    from transformers import Qwen3Config as HFConfig

__all__ = [
    "PADDED",
    "PREFIX",
    "gguf_metadata",
    "own_tensor",
    "to_hf",
]  # as `hf/convert.py` wants them

NAME = "Qwen3"
TYPES = llama.TYPES | dict.fromkeys(llama.DERIVED, int)
# The values of HF's options for which its Qwen3 equals `models/qwen3.py`.
SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "use_sliding_window": (False,),
}


def hf_config(config: Qwen3Config, special_ids: Mapping[str, int]) -> "HFConfig":
    """Returns HF's config of the same model, with `special_ids` such as `eos_token_id`."""
    from transformers import Qwen3Config as HFConfig

    values = llama.hf_values(config)
    return HFConfig(**values, **special_ids, architectures=["Qwen3ForCausalLM"])


def default_values() -> dict[str, Any]:
    """Returns the values of HF's `config.json` where it leaves them out."""
    from transformers import Qwen3Config as HFConfig

    return HFConfig().to_dict() | {"rope_parameters": None, "layer_types": None}


def own_config(values: dict[str, Any], dropout: float) -> Qwen3Config:
    """Returns the shape that the `values` of a `config.json` describe; `dropout` must be 0.

    Raises `ValueError` if there is none."""
    if set(values["layer_types"] or ()) - {"full_attention"}:
        raise ValueError("layer_types has other layers than full_attention, which cannot load")
    return llama.rotary_config(Qwen3Config, values, dropout)


def describe(config: Qwen3Config) -> str:
    """Describes the model in one sentence, for its card."""
    return f"A {NAME} of {llama.shape_in_words(config)}."


def gguf_tensor(key: str, tensor: torch.Tensor, config: Qwen3Config) -> torch.Tensor:
    """Returns a tensor of `to_hf` as llama.cpp has it."""
    return tensor
