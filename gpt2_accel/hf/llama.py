"""Hugging Face's Llama and `models/llama.py`, with the same tensors.

The conversions of Qwen3 and NanoChat are changes of this one.
"""

from collections.abc import Mapping
from typing import Any

from gpt2_accel.hf import Conversion, DifferentModel
from gpt2_accel.models import config_class
from gpt2_accel.models.llama import LlamaConfig


def read(values: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    """Returns the base of the rotary frequencies; `dropout` must be 0."""
    kind = config_class(values["model_type"])
    assert issubclass(kind, LlamaConfig)
    kind.check_dropout(dropout)
    rotary = values["rope_parameters"]
    if rotary["rope_type"] != "default":
        raise DifferentModel(f"its rotary positions are scaled ({rotary['rope_type']})")
    unknown = rotary.keys() - {"rope_type", "type", "rope_theta"}
    if unknown:
        raise DifferentModel(f"its rotary positions have {min(unknown)}")
    if set(values.get("layer_types") or ()) - {"full_attention"}:  # Qwen3's
        raise DifferentModel("it has layers with a sliding window")
    return {"rope_theta": float(rotary["rope_theta"])}


def write(config: LlamaConfig) -> dict[str, Any]:
    """Returns the base of the rotary frequencies as HF has it."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}


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
        "use_sliding_window": (False,),
    },
    read=read,
    write=write,
)
