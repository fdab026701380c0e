"""Hugging Face's NanoChat and `models/nanochat.py`, with the same tensors."""

from dataclasses import replace

from gpt2_accel.hf import llama

CONVERSION = replace(
    llama.CONVERSION,
    name="Nanochat",
    model_class="NanoChatForCausalLM",
    fields=dict(llama.CONVERSION.fields, final_logit_softcapping="soft_cap"),
    supported=dict(llama.CONVERSION.supported, hidden_act=("relu2",)),
)
