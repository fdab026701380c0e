"""Exports a model and its tokenizer as one GGUF file, for llama.cpp and programs built on it.

Names, transposed matrices, dtypes and metadata are those of llama.cpp's converter, `convert_hf_to_gguf.py`. A GGUF file
does not name the activation: llama.cpp gives every GPT-2 the tanh approximation of GELU. It uses the token embedding as
the head where none is stored.
"""

import importlib
import json
import struct
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from gpt2_accel.hf.convert import conversion
from gpt2_accel.models import LanguageModel
from gpt2_accel.models.gpt2 import GPT
from gpt2_accel.models.qwen3 import Qwen3
from gpt2_accel.tokenizer import byte_symbols, check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARCHITECTURES = {GPT: "gpt2", Qwen3: "qwen3"}  # by llama.cpp's names
# dtype -> the file type in the metadata.
DTYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
PRE_TOKENIZER = "gpt-2"  # llama.cpp's name of GPT-2's word splitting
# What the parts of a `tokenizer.json` must be for llama.cpp's tokenizer of this name to give the same token ids.
EXACT = {
    "normalizer": [None],
    "pre_tokenizer.type": ["ByteLevel"],
    "pre_tokenizer.add_prefix_space": [False],
    "pre_tokenizer.use_regex": [True],
    "model.dropout": [None, 0.0],
    "model.continuing_subword_prefix": [None, ""],
    "model.end_of_word_suffix": [None, ""],
    "model.ignore_merges": [None, False],
}


def write_gguf(
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    path: Path,
    dtype: str = "f32",
    name: str = "",
) -> None:
    """Writes the model in `dtype`, one of `DTYPES`, with its tokenizer. `name` is the model's name in the file.

    Vectors and position embeddings stay fp32. In q8_0 a matrix whose rows are not a multiple of 32 numbers long is fp16.
    Raises `ValueError` if the package gguf is missing, `dtype` is unknown, the model has the exact GELU, a weight is
    too large for fp16, or llama.cpp would encode some text differently than the tokenizer.
    """
    gguf = import_gguf()
    if dtype not in DTYPES:
        raise ValueError(f"GGUF's dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if isinstance(model, GPT) and model.config.gelu != "tanh":
        raise ValueError(
            "the model has the exact GELU, but GGUF's GPT-2 has the tanh approximation: export it as onnx"
        )
    writer = gguf_writer(path, ARCHITECTURES[type(model)])
    check_vocabulary(tokenizer, model.config.vocab_size, name or "the model")
    add_shape(writer, model, dtype, name)
    add_tokenizer(writer, tokenizer, model.config.vocab_size)
    tensors = gguf_tensors(model, dtype)
    for key, (tensor, kind) in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[kind]
        bytes_needed = tensor.numel() // block * size
        writer.add_tensor_info(key, tensor.shape, np.dtype(np.float32), bytes_needed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, (tensor, kind) in tensors.items():  # one at a time: no second copy of the weights
        writer.write_tensor_data(quantized(tensor, kind, key))
    writer.close()


def import_gguf() -> ModuleType:
    """Imports the package gguf. Raises `ValueError` if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ValueError("GGUF files need gguf: pip install 'gguf>=0.17'") from error


def gguf_writer(path: Path, architecture: str):
    """Returns a `gguf.GGUFWriter` of `architecture` that can write an empty list of merges, which a byte tokenizer has."""
    gguf = import_gguf()
    kinds = gguf.GGUFValueType

    class Writer(gguf.GGUFWriter):
        def _pack_val(self, val, vtype, *args, **kwargs):
            if vtype == kinds.ARRAY and len(val) == 0:
                return struct.pack("<IIQ", kinds.ARRAY, kinds.STRING, 0)
            return super()._pack_val(val, vtype, *args, **kwargs)

    return Writer(path, architecture)


def add_shape(writer, model: LanguageModel, dtype: str, name: str) -> None:
    """Adds the metadata of the model to a `gguf.GGUFWriter`."""
    gguf, config = import_gguf(), model.config
    writer.add_type("model")
    if name:
        writer.add_name(name)
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_head_count(config.n_head)
    if isinstance(model, Qwen3):
        writer.add_feed_forward_length(config.n_inner)
        writer.add_head_count_kv(config.n_kv_head)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(model.ln_f.eps)
    writer.add_file_type(gguf.LlamaFileType[DTYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def gguf_tensors(model: LanguageModel, dtype: str) -> dict[str, tuple[torch.Tensor, int]]:
    """Returns the weights by their GGUF name, as Linear weights, each with its `gguf.GGMLQuantizationType`.

    A GPT-2 without biases gets biases of zero. The tied head is not stored."""
    gguf, converted = import_gguf(), conversion(model.config)
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[type(model)].upper()]
    names = gguf.get_tensor_name_map(architecture, model.config.n_layer)
    kinds = gguf.GGMLQuantizationType
    tensors = {}
    for key, tensor in converted.to_hf(model).items():
        if key.endswith(converted.TRANSPOSED):
            tensor = tensor.t()
        kind = kinds[dtype.upper()]
        if tensor.ndim == 1 or "wpe" in key:
            kind = kinds.F32
        elif tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = kinds.F16
        tensors[names.get_name(key, try_suffixes=(".weight", ".bias"))] = (tensor, kind)
    return tensors


def quantized(tensor: torch.Tensor, kind: int, key: str) -> np.ndarray:
    """Converts a weight to the bytes of a GGUF tensor. Raises `ValueError` if it is too large for fp16."""
    array = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    with np.errstate(over="ignore"):
        found = import_gguf().quantize(array, kind)
    if found.dtype == np.float16 and not np.isfinite(found).all():
        raise ValueError(f"{key} has numbers that fp16 cannot hold: export it as bf16 or f32")
    return found


# The tokenizer


def add_tokenizer(writer, tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Adds a byte-level BPE to a `gguf.GGUFWriter`; rows of the model without a token get an unused one.

    Raises `ValueError` if llama.cpp would encode some text differently."""
    gguf = import_gguf()
    backend = exact_backend(tokenizer)
    kinds = gguf.TokenType
    tokens = {i: (f"[PAD{i}]", kinds.UNUSED) for i in range(vocab_size)}
    tokens |= {i: (token, kinds.NORMAL) for token, i in backend["model"]["vocab"].items()}
    for added in backend["added_tokens"]:
        kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        tokens[added["id"]] = (added["content"], kind)
    names, types = zip(*(tokens[i] for i in range(vocab_size)), strict=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(names)
    writer.add_token_types(types)
    merges = [" ".join(pair) for pair in backend["model"]["merges"]]
    key, kinds = gguf.Keys.Tokenizer.MERGES, gguf.GGUFValueType
    writer.add_key_value(key, merges, kinds.ARRAY, kinds.STRING)
    end = tokenizer.eos_token_id
    writer.add_bos_token_id(end if tokenizer.bos_token_id is None else tokenizer.bos_token_id)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def exact_backend(tokenizer: "PreTrainedTokenizerBase") -> dict:
    """Returns the content of `tokenizer.json`. Raises `ValueError` if llama.cpp's tokenizer differs from it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = backend["model"]["type"]
    if kind != "BPE":
        named = "a character tokenizer" if kind == "WordLevel" else f"of the type {kind}"
        raise ValueError(
            f"the tokenizer is {named}, and GGUF export needs a byte-level BPE: export the model as onnx"
        )
    for name, allowed in EXACT.items():
        value = backend
        for part in name.split("."):
            value = (value or {}).get(part)
        if value not in allowed:
            raise_differs(f"{name} is {json.dumps(value)}, not {json.dumps(allowed[-1])}")
    added = {token["content"]: token for token in backend["added_tokens"]}
    for content, token in added.items():
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise_differs(f"{content} takes the spaces around it, or matches whole words only")
    letters = set("".join(backend["model"]["vocab"].keys() - added))
    if other := letters - set(byte_symbols()):
        raise_differs(f"the vocabulary is not byte-level: it has {min(other)!r}")
    if tokenizer("")["input_ids"]:
        raise_differs("it adds special tokens to each text")
    if tokenizer.eos_token_id is None:
        raise_differs("it has no token that ends a text")
    return backend


def raise_differs(reason: str) -> NoReturn:
    """Raises `ValueError`: llama.cpp cannot encode as the tokenizer does, for this reason."""
    raise ValueError(
        f"llama.cpp cannot encode text as the tokenizer does ({reason}): export the model as onnx"
    )
