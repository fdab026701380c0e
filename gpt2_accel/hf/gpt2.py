"""Hugging Face's GPT-2 and `models/gpt2.py`.

HF stores the transpose of four matrices per block. It always has biases, so a model without biases
writes zeros and `"bias": false` in `config.json`.
"""

from collections.abc import Mapping
from typing import Any

from gpt2_accel.hf import Conversion, DifferentModel
from gpt2_accel.models.gpt2 import GPTConfig

MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# HF's activation names -> `GPTConfig.gelu`; the first name of each value is the one written.
ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}
SAME_NAMES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "bias")


def read(values: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    """Returns the config's fields that are not in `Conversion.fields`."""
    if values["n_inner"] not in (None, 4 * values["n_embd"]):
        raise DifferentModel(f"its n_inner is {values['n_inner']}, not 4 * n_embd")
    return {"gelu": ACTIVATIONS[values["activation_function"]], "dropout": dropout}


def write(config: GPTConfig) -> dict[str, Any]:
    """Returns HF's other fields. Programs other than transformers need `n_ctx`."""
    return {
        "n_ctx": config.n_positions,
        "activation_function": next(hf for hf, own in ACTIVATIONS.items() if own == config.gelu),
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
    }


CONVERSION = Conversion(
    name="GPT-2",
    model_class="GPT2LMHeadModel",
    prefix="transformer.",
    padded=("wte.weight",),
    transposed=MATRICES,
    biased=("ln_1.weight", "ln_2.weight", "ln_f.weight", *MATRICES),
    ignored=(".attn.bias", ".attn.masked_bias"),  # causal masks
    fields={name: name for name in SAME_NAMES},
    supported={
        "bias": (True, False),
        "activation_function": tuple(ACTIVATIONS),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    read=read,
    write=write,
)
