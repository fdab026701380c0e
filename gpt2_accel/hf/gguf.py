"""Exports a model and its tokenizer as one GGUF file, for llama.cpp and programs built on it.

Names, dtypes and metadata are those of llama.cpp's converter, `convert_hf_to_gguf.py`. `hf/NAME.py` has what is special
to the architecture NAME, which llama.cpp calls by the same name. llama.cpp uses the token embedding as the head where
none is stored.
"""

import importlib
import json
import struct
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from gpt2_accel.hf.convert import check_finite, conversion
from gpt2_accel.models import LanguageModel
from gpt2_accel.tokenizer import byte_symbols, check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# dtype -> the file type in the metadata.
DTYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
# llama.cpp's name of a word splitting -> the pre-tokenizers of a `tokenizer.json`: GPT-2's, and SmolLM2's, which also
# takes digits apart.
WORD_SPLITTINGS = {"gpt-2": ["ByteLevel"], "smollm": ["Digits", "ByteLevel"]}
# Their options, by the pre-tokenizer.
OPTIONS = {
    "ByteLevel": {"add_prefix_space": False, "use_regex": True},
    "Digits": {"individual_digits": True},
}
# What other parts of a `tokenizer.json` must be for llama.cpp's tokenizers of these names to give the same token ids.
EXACT = {
    "normalizer": [None],
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
    Raises `ValueError` if the package gguf is missing, `dtype` is unknown, llama.cpp lacks some part of the model (the
    exact GELU), a weight is NaN, infinite or too large for fp16, or llama.cpp would encode some text differently than
    the tokenizer.
    """
    gguf = import_gguf()
    if dtype not in DTYPES:
        raise ValueError(f"GGUF's dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    check_finite(model)
    writer = gguf_writer(path, model.config.architecture)
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
    conversion(config).gguf_metadata(writer, config)
    writer.add_file_type(gguf.LlamaFileType[DTYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def gguf_tensors(model: LanguageModel, dtype: str) -> dict[str, tuple[torch.Tensor, int]]:
    """Returns the weights by their GGUF name, as Linear weights, each with its `gguf.GGMLQuantizationType`.

    A GPT-2 without biases gets biases of zero. The tied head is not stored."""
    gguf, config = import_gguf(), model.config
    converted = conversion(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.architecture.upper()], config.n_layer)
    kinds = gguf.GGMLQuantizationType
    tensors = {}
    for key, tensor in converted.to_hf(model).items():
        tensor = converted.gguf_tensor(key, tensor, config)
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        kind = kinds[dtype.upper()]
        if tensor.ndim == 1 or name.startswith("position_embd"):
            kind = kinds.F32
        elif tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = kinds.F16
        tensors[name] = (tensor, kind)
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
    writer.add_tokenizer_pre(word_splitting(backend["pre_tokenizer"]))
    writer.add_token_list(names)
    writer.add_token_types(types)
    merges = [" ".join(pair) for pair in backend["model"]["merges"]]
    key, kinds = gguf.Keys.Tokenizer.MERGES, gguf.GGUFValueType
    writer.add_key_value(key, merges, kinds.ARRAY, kinds.STRING)
    end = tokenizer.eos_token_id
    writer.add_bos_token_id(end if tokenizer.bos_token_id is None else tokenizer.bos_token_id)
    writer.add_eos_token_id(end)
    if tokenizer.pad_token_id not in (None, end):
        writer.add_pad_token_id(tokenizer.pad_token_id)
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
            f"the tokenizer is {named}, and GGUF export needs a byte-level BPE: export it as ONNX (docs/serving.md)"
        )
    for name, allowed in EXACT.items():
        value = backend
        for part in name.split("."):
            value = (value or {}).get(part)
        if value not in allowed:
            raise_differs(f"{name} is {json.dumps(value)}, not {json.dumps(allowed[-1])}")
    word_splitting(backend["pre_tokenizer"])
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


def word_splitting(pre_tokenizer: dict | None) -> str:
    """Returns llama.cpp's name of a `tokenizer.json`'s pre-tokenizer. Raises `ValueError` if it has none."""
    pre_tokenizer = pre_tokenizer or {"type": None}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part["type"] for part in parts]
    for part in parts:
        for option, value in OPTIONS.get(part["type"], {}).items():
            if part.get(option) != value:
                raise_differs(
                    f"{option} is {json.dumps(part.get(option))}, not {json.dumps(value)}"
                )
    for name, known in WORD_SPLITTINGS.items():
        if kinds == known:
            return name
    raise_differs(f"its pre-tokenizer is {json.dumps(kinds)}, not {json.dumps(['ByteLevel'])}")


def raise_differs(reason: str) -> NoReturn:
    """Raises `ValueError`: llama.cpp cannot encode as the tokenizer does, for this reason."""
    raise ValueError(
        f"llama.cpp cannot encode text as the tokenizer does ({reason}): export it as ONNX (docs/serving.md)"
    )
