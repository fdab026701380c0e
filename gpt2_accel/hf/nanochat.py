"""Hugging Face's NanoChat and `models/nanochat.py`, whose tensors are the same."""

from dataclasses import replace
from typing import Any

from gpt2_accel.hf import llama
from gpt2_accel.models.nanochat import NanochatConfig


def gguf(config: NanochatConfig) -> dict[str, Any]:
    """Raises `ValueError`."""
    raise ValueError(
        "llama.cpp does not have nanochat: serve the model by transformers serve (docs/hub.md)"
    )


CONVERSION = replace(
    llama.CONVERSION,
    name="Nanochat",
    model_class="NanoChatForCausalLM",
    fields=dict(llama.CONVERSION.fields, final_logit_softcapping="soft_cap"),
    supported={
        "hidden_act": ("relu2",),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
    },
    gguf=gguf,
)
