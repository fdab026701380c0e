"""Hugging Face's Llama and `models/llama.py`: tensors and `config.json`, both ways; llama.cpp's tensors and metadata.

The tensors are the same. HF's names begin with `model.`, except that of the head. Vocabulary padding is not stored, nor
is a tied head.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gpt2_accel.models.llama import Llama, LlamaConfig

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import LlamaConfig as HFConfig

NAME = "Llama"
PREFIX = "model."
PADDED = ("embed_tokens.weight", "lm_head.weight")
# HF's name -> that of `LlamaConfig`.
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
DERIVED = ("num_key_value_heads", "head_dim")  # may be absent or null, and then follow from others
TYPES = dict.fromkeys([key for key in NAMES if key not in DERIVED], int)
TYPES |= {"tie_word_embeddings": bool, "rms_norm_eps": float}
# The values of HF's options for which its Llama equals `models/llama.py`.
SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
}


def to_hf(model: Llama) -> dict[str, torch.Tensor]:
    """Returns the weights under HF's names, as views."""
    rows = model.config.vocab_size
    return {
        (name if name == "lm_head.weight" else PREFIX + name): tensor[:rows]
        if name in PADDED
        else tensor
        for name, tensor in model.state_dict().items()
    }


def own_tensor(
    key: str, tensor: torch.Tensor, config: LlamaConfig, source: str
) -> tuple[str, torch.Tensor] | None:
    """Returns the name and the tensor that `models/llama.py` has for a tensor of a file, or None if it has none.

    Old files hold the rotary frequencies, which are computed here."""
    if key.endswith(".rotary_emb.inv_freq"):
        return None
    return key.removeprefix(PREFIX), tensor


def hf_config(config: LlamaConfig, special_ids: Mapping[str, int]) -> "HFConfig":
    """Returns HF's config of the same model, with `special_ids` such as `eos_token_id`."""
    from transformers import LlamaConfig as HFConfig

    return HFConfig(**hf_values(config), **special_ids, architectures=["LlamaForCausalLM"])


def hf_values(config: LlamaConfig) -> dict[str, Any]:
    """Returns the arguments of HF's config, without special tokens."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    values = {theirs: getattr(config, ours) for theirs, ours in NAMES.items()}
    return {**values, "rope_parameters": rope}


def default_values() -> dict[str, Any]:
    """Returns the values of HF's `config.json` where it leaves them out; None for those that depend on others."""
    from transformers import LlamaConfig as HFConfig

    unknown = dict.fromkeys(("rope_parameters", *DERIVED))
    return HFConfig().to_dict() | unknown


def own_config(values: dict[str, Any], dropout: float) -> LlamaConfig:
    """Returns the shape that the `values` of a `config.json` describe; `dropout` must be 0.

    Raises `ValueError` if there is none."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if heads < 1 or width % heads:
        raise ValueError(
            f"hidden_size ({width}) is not a multiple of num_attention_heads ({heads}), as transformers demands"
        )
    derived = {"num_key_value_heads": heads, "head_dim": width // heads}
    values = values | {key: size for key, size in derived.items() if values[key] is None}
    for key in DERIVED:
        if type(values[key]) is not int:
            raise ValueError(f"{key} = {values[key]!r}; expected int")
    return rotary_config(LlamaConfig, values, dropout)


def rotary_config(
    config_class: type[LlamaConfig], values: dict[str, Any], dropout: float
) -> LlamaConfig:
    """Returns the shape from the `values` that `NAMES` lists, with the base of the rotary frequencies."""
    config_class.check_dropout(dropout)
    sizes = {ours: values[theirs] for theirs, ours in NAMES.items()}
    return config_class(**sizes, rope_theta=rotary_base(values))


def rotary_base(values: dict[str, Any]) -> float:
    """Returns the base of the rotary frequencies.

    transformers 5 writes `rope_parameters`, earlier releases wrote `rope_theta` and `rope_scaling`. Raises `ValueError`
    for scaled rotary positions, which `models/parts.py` does not have."""
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


def describe(config: LlamaConfig) -> str:
    """Describes the model in one sentence, for its card."""
    return f"A {NAME} of {shape_in_words(config)}."


def shape_in_words(config: LlamaConfig) -> str:
    """Returns the sizes of a model, for its card."""
    return (
        f"{config.parameter_count:,} parameters: {config.n_layer} layers, {config.n_head} heads and "
        f"{config.n_kv_head} of keys and values, {config.n_embd} wide, {config.n_positions:,} positions, a vocabulary "
        f"of {config.vocab_size:,}"
    )


def gguf_metadata(writer: "GGUFWriter", config: LlamaConfig) -> None:
    """Adds to a GGUF file what llama.cpp needs to know of this architecture."""
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def gguf_tensor(key: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Returns a tensor of `to_hf` as llama.cpp has it.

    llama.cpp turns channels 2i and 2i + 1 of a Llama's head together, HF channels i and i + D/2; so the rows of the
    query and key matrices are in another order (`LlamaModel.permute` of llama.cpp's `convert_hf_to_gguf.py`)."""
    if not key.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))  # (heads, 2, D/2, C)
    return halves.transpose(1, 2).flatten(0, 2)
