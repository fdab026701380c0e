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
    path: Path, own_tokenizer: bool = True
) -> "tuple[LanguageModel, PreTrainedTokenizerBase | None]":
    """Loads the model, dequantized to fp32, and the tokenizer of a GGUF file by `transformers`.

    Takes minutes if the vocabulary is large. Raises `ValueError` if the file is damaged, is not a
    whole model, lacks tensors or has others, or if `transformers` or this package does not support
    the model, its rotary positions or, unless `own_tokenizer` is False, its tokenizer.
    """
    from transformers import AutoConfig

    print(f"reading {path} to fp32, which takes minutes for a large vocabulary", file=sys.stderr)
    try:
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

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
        tokenizer = gguf_tokenizer(path, values) if own_tokenizer else None
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        factors = tensors.pop("rope_freqs.weight", None)
        if factors or any(".rope.scal" in name for name in values):
            config.rope_parameters = scaled_rope(config, values, factors and factors.data)
        head, embedding = tensors.get("output.weight"), tensors["token_embd.weight"]
        if head and np.array_equal(head.data, embedding.data):  # a copy of a tied head
            del tensors["output.weight"]
            config.tie_word_embeddings = True
        options = {"config": config, "output_loading_info": True}
        inner, report = open_class(path.parent, gguf_file=path.name, **options)
        if report["missing_keys"]:
            raise ValueError(f"it lacks {min(report['missing_keys'])}: download it again")
        read = {tensor.data_ptr(): tensor.numel() for tensor in inner.state_dict().values()}
        if sum(tensor.n_elements for tensor in tensors.values()) > sum(read.values()):
            [arch] = (k for k, v in MODEL_ARCH_NAMES.items() if v == values["general.architecture"])
            names = get_tensor_name_map(arch, config.num_hidden_layers)
            known = {names.get_name(name, (".weight", ".bias")) for name in inner.state_dict()}
            extra = min(tensors.keys() - known, default="output.weight")
            raise ValueError(f"the model of transformers does not have its {extra}")
    except Exception as error:  # the libraries raise several types
        raise ValueError(
            f"cannot read {path}: {sentence(error)}; it needs pip install 'gguf>=0.17' "
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
    prefix = values["general.architecture"] + ".rope.scal"
    given = {k.rpartition(".")[2]: v for k, v in values.items() if k.startswith(prefix)}
    kind = given.pop("type", "linear")
    factor = given.pop("factor", given.pop("scale_linear", 1))
    length = given.pop("original_context_length", config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = length
    elif factors is not None and factor == 1:
        factor = float(factors.max())
        powers = np.arange(len(factors)) / len(factors)
        wavelengths = 2 * np.pi * rope["rope_theta"] ** powers
        kept = ((8192 / wavelengths - 1) / 3).clip(0, 1)
        if np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-5):
            factors = None
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    elif kind == "none" or factor == 1:
        scaling = {}
    known = kind in ("none", "linear", "yarn") and "rope_theta" in rope
    if factors is not None or not known or set(given.values()) - {0, 1}:
        name = given or ("rope_freqs.weight" if known else "")
        raise ValueError(f"it scales rotary positions by {kind} {name}, which is not supported")
    return rope | scaling


def gguf_tokenizer(path: Path, values: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a GGUF file with these values, or the `tokenizer.json` beside it.

    Raises `ValueError` if that has other tokens, or if it is not known how the file's splits words.
    """
    from transformers import AutoTokenizer

    tokens = values["tokenizer.ggml.tokens"]
    if (path.parent / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(path.parent)
        vocab = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        if any(tokens[i : i + 1] != [token] for token, i in vocab.items()):
            raise ValueError("the tokenizer.json beside it has other tokens: remove it")
        for name in ("bos", "eos"):
            i = values.get(f"tokenizer.ggml.{name}_token_id")
            if i is not None and getattr(tokenizer, f"{name}_token") is None:
                setattr(tokenizer, f"{name}_token", tokens[i])
        tokenizer.chat_template = tokenizer.chat_template or values.get("tokenizer.chat_template")
        return tokenizer
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    as_gpt2 = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    splits = values.get("tokenizer.ggml.pre", "default")
    if splits in ("smollm", "starcoder"):
        each_digit = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([each_digit, backend.pre_tokenizer])
    elif as_gpt2 and splits not in ("gpt-2", "phi-2"):
        fix = "put its tokenizer.json beside it, or give --tokenizer"
        if splits != "default":
            raise ValueError(f"its tokenizer splits words by the rules of {splits!r}: {fix}")
        print(f"{path} does not say how it splits words: taken as GPT-2's, or {fix}")
    if splits == "llama-bpe":
        backend.model.ignore_merges = True  # words of the vocabulary are tokens, as in Llama 3
    if splits == "qwen2":
        backend.normalizer = normalizers.NFC()
    return tokenizer
