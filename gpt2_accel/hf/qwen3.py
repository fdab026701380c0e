"""Hugging Face's Qwen3 and `models/qwen3.py`, with the same tensors."""

from dataclasses import replace

from gpt2_accel.hf import llama

CONVERSION = replace(llama.CONVERSION, name="Qwen3", model_class="Qwen3ForCausalLM")
