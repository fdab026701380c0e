"""Tiny models of families of `transformers` that the package has no module for, as a user's directories."""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gpt2_accel.tokenizer import byte_tokenizer

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
# model_type -> what differs from `SIZES`
FAMILIES = {
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"sliding_window": 8},
    "olmo2": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.0},
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
    "smollm3": {},
    "phi3": {},
    "granite": {"logits_scaling": 2.0},
}


def family_model(kind: str, **changes: object) -> torch.nn.Module:
    """Builds a model of a family with random weights."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | FAMILIES.get(kind, {}) | changes)
    return AutoModelForCausalLM.from_config(config)


def save_family(kind: str, folder: Path, **changes: object) -> Path:
    """Saves a model of a family and a tokenizer of bytes; returns the folder."""
    family_model(kind, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
