"""Importers for GGUF files and for the `.pt` checkpoints of nanoGPT and build-nanogpt."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from gpt2_accel.hf.any_model import any_config, open_class
from gpt2_accel.hf.gpt2 import MATRICES
from gpt2_accel.hf.tensors import from_hf
from gpt2_accel.models import LanguageModel
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.runtime.files import sentence
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE, PreTrainedTokenizerBase

SCALING = ".rope.scal"  # in the names of a GGUF file's values


def read_checkpoint(path: Path) -> LanguageModel:
    """Loads a checkpoint of nanoGPT (with `model_args`) or of build-nanogpt (with `config`).

    The padding rows of a vocabulary of 50,304 are dropped. A nanoGPT model keeps its exact GELU.
    Until June 2023 nanoGPT used GPT-2's approximation, which its files do not record.

    Raises `ValueError` if the file is damaged, contains other objects than tensors and plain
    values, or is another kind of checkpoint.
    """
    # build-nanogpt pickles its config class; a plain class stands for it, so no code runs.
    plain = (SimpleNamespace, "__main__.GPTConfig")
    try:
        with torch.serialization.safe_globals([plain]):
            checkpoint = torch.load(path, "cpu", weights_only=True, mmap=True)
        tensors = checkpoint["model"]
        values = checkpoint.get("model_args") or vars(checkpoint["config"])
        rows = values["vocab_size"]
        config = GPTConfig(
            GPT2_VOCAB_SIZE if rows == 50304 else rows,
            values["block_size"],
            values["n_layer"],
            values["n_head"],
            values["n_embd"],
            bias=values.get("bias", True),
            gelu="none" if "model_args" in checkpoint else "tanh",
        )
    except Exception as error:  # a damaged pickle, or another content, may raise any
        raise ValueError(
            f"{path} is damaged, or not a checkpoint of nanoGPT or build-nanogpt ({error!r}): copy "
            "the file again, or give the .pt file that its training script wrote, with tensors and "
            "plain values only: other objects could run code"
        ) from error
    converted = {}
    for key, tensor in tensors.items():
        name = re.sub(r"^(module\.|_orig_mod\.)+", "", key)  # DDP and `torch.compile` add them
        if name.endswith(("wte.weight", "lm_head.weight")):
            tensor = tensor[: config.vocab_size]
        if name.endswith(MATRICES):
            tensor = tensor.t()  # `nn.Linear` to HF's `Conv1D`
        converted[name] = tensor
    return from_hf(converted.items(), config, str(path))


def read_gguf(
    path: Path, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> "tuple[LanguageModel, PreTrainedTokenizerBase]":
    """Loads the model, dequantized to fp32, and the tokenizer of a GGUF file by `transformers`.

    Takes minutes if the vocabulary is large. Raises `ValueError` if the file is damaged, is not a
    model in one file, lacks tensors or has others, or if `transformers` or this package does not
    support the model, its rotary positions or its tokenizer, if none is given.
    """
    print(f"reading {path} to fp32, which takes minutes for a large vocabulary", file=sys.stderr)
    try:
        from gguf import GGUFReader
        from transformers.modeling_gguf_pytorch_utils import (
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        reader = GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        kind = values.get("general.type", "model")
        if kind != "model" or values.get("split.count", 0) > 1 or path.suffix != ".gguf":
            raise ValueError(
                f"its type is {kind} (a LoRA or mmproj file?), it is one part of a model, or it is "
                "not named .gguf: give the model, join it by llama-gguf-split --merge, or rename it"
            )
        tokenizer = tokenizer or gguf_tokenizer(path, values)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        factors = tensors.pop("rope_freqs.weight", None)
        if factors or any(SCALING in name for name in values):
            config.rope_parameters = scaled_rope(config, values, factors and factors.data)
        inner, report = open_class(
            path.parent, gguf_file=path.name, config=config, output_loading_info=True
        )
        if report["missing_keys"]:
            raise ValueError(f"it lacks {min(report['missing_keys'])}: download it again")
        if sum(each.n_elements for each in tensors.values()) > inner.num_parameters():
            known = get_gguf_hf_weights_map(inner, TensorProcessor())
            extra = min(tensors.keys() - known, default="output.weight")
            raise ValueError(f"transformers' {type(inner).__name__} does not have its {extra}")
    except Exception as error:  # the libraries raise several types
        raise ValueError(
            f"cannot read {path}: {sentence(error)}; it needs pip install 'gguf>=0.16' "
            "'transformers>=5.23', and a GGUF file of a model that transformers supports"
        ) from error
    inner.hf_quantizer = None  # the weights are no longer quantized
    inner.is_quantized = False
    del inner.config.quantization_config
    return AnyModel(any_config(inner.config.to_dict(), "of a GGUF file", None), inner), tokenizer


def scaled_rope(
    config: PreTrainedConfig, values: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any]:
    """Returns the `rope_parameters` of a GGUF file, whose scaling `transformers` does not read.

    `values` are the file's, and `factors`, (head_dim / 2,) fp32, divide its frequencies. They are
    taken if they are those of Llama 3.1 (arXiv:2407.21783): 1 for wavelengths below 8192 / 4, one
    number for those above 8192, and between them 1 / factor is linear in 1 / wavelength. Raises
    `ValueError` for others.
    """
    given = {k.rpartition(".")[2]: v for k, v in values.items() if SCALING in k}
    kind = given.pop("type", "linear")
    factor = given.pop("factor", 1)
    length = given.pop("original_context_length", config.max_position_embeddings)
    rope = dict(config.rope_parameters)
    known = kind in ("none", "linear", "yarn") and "rope_theta" in rope
    if known and factors is not None:
        known = kind == "none" or factor == 1
        factor = float(factors.max())
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(len(factors)) / len(factors))
        kept = ((8192 / wavelengths - 1) / 3).clip(0, 1)
        known &= np.allclose(factors, 1 / ((1 - kept) / factor + kept))
        kind, length = "llama3", 8192
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if not known or set(given.values()) - {0, 1}:
        raise ValueError(f"its scaling of rotary positions is not supported: {kind} {given}")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": factor}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = length
    return rope


def gguf_tokenizer(path: Path, values: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a GGUF file with these values.

    Raises `ValueError` if a `tokenizer.json` beside the file would take its place, or if it is not
    known how the file's splits words.
    """
    splits = values.get("tokenizer.ggml.pre", "default")
    problem = f"it splits words by the rules {splits!r}"
    if (path.parent / "tokenizer.json").is_file():
        problem = "transformers would take the tokenizer.json beside it"
    else:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        backend = tokenizer.backend_tokenizer
        if splits == "smollm":
            each_digit = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([each_digit, backend.pre_tokenizer])
        elif splits == "llama-bpe":
            backend.model.ignore_merges = True  # words of the vocabulary are tokens, as in Llama 3
        elif splits == "qwen2":
            backend.normalizer = normalizers.NFC()
        if splits == "gpt-2" or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
            return tokenizer
    raise ValueError(f"{problem}: give --tokenizer, the HF directory or Hub id of its tokenizer")
