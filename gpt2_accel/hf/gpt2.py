"""Hugging Face's GPT-2 and `models/gpt2.py`: tensors and `config.json`, both ways; llama.cpp's tensors and metadata.

The two formats differ in four ways. HF's `Conv1D` stores the transpose of a Linear weight, so four matrices per block
are transposed. HF always has biases, so a model without biases writes zeros and `"bias": false` in `config.json`.
Vocabulary padding is not stored. The tied head is not stored.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gpt2_accel.models.gpt2 import GPT, GPTConfig

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import GPT2Config

NAME = "GPT-2"
PREFIX = "transformer."
PADDED = ("wte.weight",)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
LEGACY_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks in old files
# HF's activation names -> `GPTConfig.gelu`; the first name of each value is the one written.
ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}
# The values of HF's options for which its GPT-2 equals `models/gpt2.py`.
SUPPORTED = {
    "activation_function": tuple(ACTIVATIONS),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
# The fields of `GPTConfig` that HF's config has by the same names.
TYPES = dict.fromkeys(("vocab_size", "n_positions", "n_layer", "n_head", "n_embd"), int)
TYPES["bias"] = bool


def to_hf(model: GPT) -> dict[str, torch.Tensor]:
    """Returns the weights under HF's names and shapes, as views where possible, so not all are contiguous."""
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name in PADDED:
            tensor = tensor[: config.vocab_size]
        if name.endswith(TRANSPOSED):
            tensor = tensor.t()
        tensors[PREFIX + name] = tensor
        if name.endswith(".weight") and not config.bias and not name.startswith(("wte", "wpe")):
            bias = PREFIX + name.removesuffix("weight") + "bias"
            tensors[bias] = tensor.new_zeros(tensor.shape[-1])
    return tensors


def own_tensor(
    key: str, tensor: torch.Tensor, config: GPTConfig, source: str, *, transposed: bool = True
) -> tuple[str, torch.Tensor] | None:
    """Returns the name and the tensor that `models/gpt2.py` has for a tensor of a file, or None if it has none.

    Keys may lack the prefix; the mask buffers of old files are ignored. With `transposed` False the four matrices of a
    block are Linear weights, as in nanoGPT. Raises `ValueError` for a nonzero bias if `config.bias` is False; `source`
    names the file."""
    name = key.removeprefix(PREFIX)
    if name.endswith(LEGACY_BUFFERS):
        return None
    if not config.bias and name.endswith(".bias"):
        if tensor.any():
            raise ValueError(f'{source} says "bias": false, but {key} is not zero')
        return None
    if transposed and name.endswith(TRANSPOSED):
        tensor = tensor.t()
    return name, tensor


def hf_config(config: GPTConfig, special_ids: Mapping[str, int]) -> "GPT2Config":
    """Returns HF's config of the same model, with `special_ids` such as `eos_token_id`. Readers outside transformers need
    `n_ctx`."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.n_positions,
        n_ctx=config.n_positions,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        bias=config.bias,
        activation_function=next(hf for hf, own in ACTIVATIONS.items() if own == config.gelu),
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        resid_pdrop=config.dropout,
        **special_ids,
        architectures=["GPT2LMHeadModel"],
    )


def default_values() -> dict[str, Any]:
    """Returns the values of HF's `config.json` where it leaves them out."""
    from transformers import GPT2Config

    return GPT2Config().to_dict() | {"bias": True}


def own_config(values: dict[str, Any], dropout: float) -> GPTConfig:
    """Returns the shape that the `values` of a `config.json` describe. Raises `ValueError` if there is none."""
    if values["n_inner"] not in (None, 4 * values["n_embd"]):
        raise ValueError(f"n_inner = {values['n_inner']}, but only 4 * n_embd can load")
    gelu = ACTIVATIONS[values["activation_function"]]
    return GPTConfig(**{key: values[key] for key in TYPES}, dropout=dropout, gelu=gelu)


def describe(config: GPTConfig) -> str:
    """Describes the model in one sentence, for its card."""
    return (
        f"A GPT-2 of {config.parameter_count:,} parameters: {config.n_layer} layers, {config.n_head} "
        f"heads, {config.n_embd} wide, {config.n_positions:,} positions, a vocabulary of "
        f"{config.vocab_size:,}."
    )


def gguf_metadata(writer: "GGUFWriter", config: GPTConfig) -> None:
    """Adds to a GGUF file what llama.cpp needs to know of this architecture. Raises `ValueError` for the exact GELU.

    A GGUF file does not name the activation: llama.cpp gives every GPT-2 the tanh approximation."""
    if config.gelu != "tanh":
        raise ValueError(
            "the model has the exact GELU, but GGUF's GPT-2 has the tanh approximation: export it as ONNX (docs/serving.md)"
        )
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_layer_norm_eps(1e-5)


def gguf_tensor(key: str, tensor: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """Returns a tensor of `to_hf` as llama.cpp has it: the matrices are Linear weights."""
    return tensor.t() if key.endswith(TRANSPOSED) else tensor
