"""Importers for GGUF files and for the `.pt` checkpoints of nanoGPT and build-nanogpt."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from gpt2_accel.hf.any_model import any_config, open_class
from gpt2_accel.hf.gpt2 import MATRICES
from gpt2_accel.hf.tensors import from_hf
from gpt2_accel.models import LanguageModel
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.runtime.files import sentence
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE, PreTrainedTokenizerBase


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


def read_gguf(path: Path) -> "tuple[LanguageModel, PreTrainedTokenizerBase]":
    """Loads the model, dequantized to fp32, and the tokenizer of a GGUF file by `transformers`.

    Takes minutes if the vocabulary is large. Raises `ValueError` if `transformers` or this package
    does not support the model, or if the file is damaged or lacks tensors.
    """
    from transformers import AutoTokenizer

    print(f"reading {path} to fp32, which takes minutes for a large vocabulary", file=sys.stderr)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        inner, report = open_class(path.parent, gguf_file=path.name, output_loading_info=True)
    except Exception as error:  # the libraries raise several types
        raise ValueError(
            f"transformers cannot read {path}: {sentence(error)}; it needs pip install "
            "'gguf>=0.14' 'transformers>=5.23', and a GGUF file of a model that it supports"
        ) from error
    if report["missing_keys"]:
        raise ValueError(f"{path} lacks {min(report['missing_keys'])}: download it again")
    inner.hf_quantizer = None  # the weights are no longer quantized
    inner.is_quantized = False
    del inner.config.quantization_config
    return AnyModel(any_config(inner.config.to_dict(), "of a GGUF file", None), inner), tokenizer
