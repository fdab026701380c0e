"""Hugging Face's Qwen3 and `models/qwen3.py`: tensors and `config.json`, both ways.

The tensors are the same. HF's names begin with `model.`, except that of the head. Vocabulary padding is not stored, nor
is a tied head.
"""

from typing import TYPE_CHECKING, Any

import torch

from gpt2_accel.models.qwen3 import Qwen3, Qwen3Config

if TYPE_CHECKING:
    from transformers import Qwen3Config as HFConfig

NAME = "Qwen3"
PREFIX = "model."
TRANSPOSED = ()
PADDED = ("embed_tokens.weight", "lm_head.weight")
# HF's name -> that of `Qwen3Config`.
NAMES = {
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
}
TYPES = dict.fromkeys(NAMES, int) | {"tie_word_embeddings": bool, "rms_norm_eps": float}
# The values of HF's options for which its Qwen3 equals `models/qwen3.py`.
SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "use_sliding_window": (False,),
}


def to_hf(model: Qwen3) -> dict[str, torch.Tensor]:
    """Returns the weights under HF's names, as views."""
    rows = model.config.vocab_size
    return {
        (name if name == "lm_head.weight" else PREFIX + name): tensor[:rows]
        if name in PADDED
        else tensor
        for name, tensor in model.state_dict().items()
    }


def own_tensor(
    key: str, tensor: torch.Tensor, config: Qwen3Config, source: str
) -> tuple[str, torch.Tensor]:
    """Returns the name and the tensor that `models/qwen3.py` has for a tensor of a file."""
    return key.removeprefix(PREFIX), tensor


def hf_config(config: Qwen3Config, end_of_text: int | None) -> "HFConfig":
    """Returns HF's config of the same model."""
    from transformers import Qwen3Config as HFConfig

    return HFConfig(
        **{theirs: getattr(config, ours) for theirs, ours in NAMES.items()},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        architectures=["Qwen3ForCausalLM"],
    )


def default_values() -> dict[str, Any]:
    """Returns the values of HF's `config.json` where it leaves them out."""
    from transformers import Qwen3Config as HFConfig

    return HFConfig().to_dict() | {"rope_parameters": None, "layer_types": None}


def own_config(values: dict[str, Any], dropout: float) -> Qwen3Config:
    """Returns the shape that the `values` of a `config.json` describe; `dropout` must be 0.

    Raises `ValueError` if there is none."""
    if dropout:
        raise ValueError("Qwen3 has no dropout: leave --dropout at 0")
    if set(values["layer_types"] or ()) - {"full_attention"}:
        raise ValueError("layer_types has other layers than full_attention, which cannot load")
    sizes = {ours: values[theirs] for theirs, ours in NAMES.items()}
    return Qwen3Config(**sizes, rope_theta=rotary_base(values))


def rotary_base(values: dict[str, Any]) -> float:
    """Returns the base of the rotary frequencies.

    transformers 5 writes `rope_parameters`, earlier releases wrote `rope_theta` and `rope_scaling`. Raises `ValueError`
    for scaled rotary positions, which `models/qwen3.py` does not have."""
    settings = {"rope_theta": values.get("rope_theta", 10_000.0)}
    settings |= values.get("rope_scaling") or {}
    settings |= values.get("rope_parameters") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        raise ValueError(f"the rotary positions are scaled ({kind}); only plain ones can load")
    theta = settings["rope_theta"]
    if type(theta) not in (int, float):
        raise ValueError(f"rope_theta is {theta!r}; expected a number")
    return float(theta)


def describe(config: Qwen3Config) -> str:
    """Describes the model in one sentence, for its card."""
    return (
        f"A Qwen3 of {config.parameter_count:,} parameters: {config.n_layer} layers, {config.n_head} heads and "
        f"{config.n_kv_head} of keys and values, {config.n_embd} wide, {config.n_positions:,} positions, a vocabulary "
        f"of {config.vocab_size:,}."
    )
