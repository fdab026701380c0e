"""Hugging Face's Llama and `models/llama.py`, whose tensors are the same."""

from collections.abc import Mapping
from typing import Any

from gpt2_accel.hf import Conversion, DifferentModel
from gpt2_accel.models import config_class
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.parts import RotaryScaling

# The kinds of scaled rotary positions -> HF's names of the fields of `RotaryScaling`.
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def read(values: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    """Returns the base and the scaling of the rotary frequencies; `dropout` must be 0."""
    config_class(values["model_type"]).check_dropout(dropout)
    rotary = values["rope_parameters"]
    kind = rotary["rope_type"]
    if kind not in SCALINGS:
        raise DifferentModel(f"its rotary positions are scaled ({kind})")
    known = {"rope_type", "type", "rope_theta", *SCALINGS[kind]}
    if unknown := rotary.keys() - known:
        raise DifferentModel(f"its rotary positions have {min(unknown)}")
    scaling = [rotary[name] for name in SCALINGS[kind]]
    return {
        "rope_theta": float(rotary["rope_theta"]),
        "rope_scaling": RotaryScaling(*scaling) if scaling else None,
    }


def write(config: LlamaConfig) -> dict[str, Any]:
    """Returns the base and the scaling of the rotary frequencies as HF has them."""
    scaling = config.rope_scaling
    kind = "default" if scaling is None else "llama3" if scaling.original_positions else "linear"
    values = dict(zip(SCALINGS[kind], scaling or (), strict=False))
    return {"rope_parameters": {"rope_type": kind, "rope_theta": config.rope_theta, **values}}


def gguf(config: LlamaConfig) -> dict[str, Any]:
    """Returns llama.cpp's metadata. Raises `ValueError` for scaled rotary positions."""
    if config.rope_scaling is not None:
        raise ValueError(
            "an export has no scaled rotary positions, as of Llama 3.1: use llama.cpp's own converter"
        )
    return {
        "feed_forward_length": config.n_inner,
        "head_count_kv": config.n_kv_head,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.norm_eps,
    }


CONVERSION = Conversion(
    name="Llama",
    model_class="LlamaForCausalLM",
    prefix="model.",
    padded=("embed_tokens.weight", "lm_head.weight"),
    ignored=(".rotary_emb.inv_freq",),
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "head_dim": "head_dim",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "tie_word_embeddings": "tied",
        "rms_norm_eps": "norm_eps",
    },
    supported={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
    },
    read=read,
    write=write,
    gguf=gguf,
    # llama.cpp turns channels 2i and 2i + 1 of a head together, HF channels i and i + D/2.
    gguf_interleaved=("q_proj.weight", "k_proj.weight"),
)
