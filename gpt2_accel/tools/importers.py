"""Importers for GGUF files and for the `.pt` checkpoints of nanoGPT and build-nanogpt."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import normalizers, pre_tokenizers

from gpt2_accel.hf.any_model import any_config, open_class
from gpt2_accel.hf.gpt2 import MATRICES
from gpt2_accel.hf.tensors import from_hf
from gpt2_accel.models import LanguageModel
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.runtime.files import sentence
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE, PreTrainedTokenizerBase, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
    from transformers import AutoConfig

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
        if kind != "model":
            raise ValueError(f"its type is {kind}, such as a LoRA or mmproj file: give the model")
        if "split.count" in values:
            raise ValueError("it is one part of a model: join them by llama-gguf-split --merge")
        if path.suffix != ".gguf":
            raise ValueError("transformers knows such files by .gguf: rename it")
        tokenizer = tokenizer or gguf_tokenizer(path, values)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        factors = tensors.pop("rope_freqs.weight", None)
        if factors or any(SCALING in name for name in values):
            config.rope_parameters = scaled_rope(config, values, factors and factors.data)
        head = tensors.get("output.weight")
        if head and np.array_equal(head.data, tensors["token_embd.weight"].data):  # it is tied
            del tensors["output.weight"]
            config.tie_word_embeddings = True
        options = {"config": config, "output_loading_info": True}
        inner, report = open_class(path.parent, gguf_file=path.name, **options)
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
    config: "PreTrainedConfig", values: Mapping[str, Any], factors: np.ndarray | None
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
    refused = kind not in ("none", "linear", "yarn") or "rope_theta" not in rope
    if kind == "yarn":
        rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": kind, "factor": factor}
    if factors is not None and not refused:
        factor = float(factors.max())
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(len(factors)) / len(factors))
        kept = ((8192 / wavelengths - 1) / 3).clip(0, 1)
        llama3 = np.allclose(factors, 1 / ((1 - kept) / factor + kept))
        refused |= rope["rope_type"] != "default" or not llama3
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if refused or set(given.values()) - {0, 1}:
        raise ValueError(f"its scaling of rotary positions is not supported: {kind} {given}")
    return rope


def gguf_tokenizer(path: Path, values: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a GGUF file with these values, or the `tokenizer.json` beside it.

    Raises `ValueError` if that has other tokens, or if it is not known how the file's splits words.
    """
    from transformers import AutoTokenizer

    if (path.parent / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(path.parent)
        tokens = values["tokenizer.ggml.tokens"]
        count = tokenizer.vocab_size  # without added tokens
        if tokenizer.convert_ids_to_tokens([*range(count)]) != tokens[:count]:
            raise ValueError("the tokenizer.json beside it has other tokens: remove it")
        end = tokens[values["tokenizer.ggml.eos_token_id"]]
        tokenizer.eos_token = tokenizer.eos_token or end
        tokenizer.chat_template = tokenizer.chat_template or values.get("tokenizer.chat_template")
        return tokenizer
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    splits = values.get("tokenizer.ggml.pre", "default")
    if splits == "smollm":
        each_digit = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([each_digit, backend.pre_tokenizer])
    elif splits == "llama-bpe":
        backend.model.ignore_merges = True  # words of the vocabulary are tokens, as in Llama 3
    elif splits == "qwen2":
        backend.normalizer = normalizers.NFC()
    gpt2 = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if gpt2 and splits not in ("gpt-2", "default"):
        raise ValueError(
            f"it splits words by the rules {splits!r}: put its tokenizer.json beside it, or give "
            "--tokenizer"
        )
    if gpt2 and splits == "default":
        print(f"{path} does not say how it splits words: taken as GPT-2's", file=sys.stderr)
    return tokenizer
