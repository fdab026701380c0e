"""Importers for GGUF files and for the `.pt` checkpoints of nanoGPT and build-nanogpt."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpt2_accel.hf import DifferentModel
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


def scaled_rope(
    config: "PreTrainedConfig", values: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any]:
    """Returns the `rope_parameters` of a GGUF file, which `transformers` does not read.

    `values` are the file's, and `factors`, (head_dim / 2,) fp32, its divisors of the frequencies.
    Those of Llama 3.1 (arXiv:2407.21783) are taken: a wavelength below 8192 / 4 keeps its
    frequency, above 8192 it is divided by the largest factor, between them 1 / factor is linear in
    1 / wavelength. Raises `DifferentModel` for other factors or kinds of scaling.
    """
    arch = values["general.architecture"]
    prefix = f"{arch}.rope.scaling."
    given = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    kind = given.pop("type", "linear")
    factor = given.pop("factor", values.get(f"{arch}.rope.scale_linear", 1.0))
    rope = dict(getattr(config, "rope_parameters", None) or {})
    length = given.pop("original_context_length", config.max_position_embeddings)
    given.pop("finetuned", None)
    if kind == "none":
        factor = 1.0
    if kind == "yarn":
        rope |= {"factor": factor, "original_max_position_embeddings": length, "rope_type": kind}
        for name in ("beta_fast", "beta_slow"):
            rope[name] = given.pop(f"yarn_{name}", None)
    elif factor != 1:
        rope |= {"factor": factor, "rope_type": kind}
    elif factors is not None:
        factor = float(factors.max())
        powers = np.arange(len(factors)) / len(factors)
        wavelengths = 2 * np.pi * rope["rope_theta"] ** powers
        kept = ((8192 / wavelengths - 1) / 3).clip(0, 1)
        if not np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-5):
            raise DifferentModel("its rope_freqs.weight is not the scaling of Llama 3.1")
        rope |= {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    other = {k: v for k, v in given.items() if v != 1}
    if other or kind not in ("none", "linear", "yarn") or "rope_theta" not in rope:
        raise DifferentModel(f"it scales rotary positions by {prefix}*: {kind} {other}")
    return rope


# Values of `tokenizer.ggml.pre`: with GPT-2's splitting of words, after the splitting of digits.
GPT2_SPLITS = ("gpt-2", "phi-2")
DIGIT_SPLITS = ("smollm", "starcoder")


def own_tokenizer(path: Path, values: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a GGUF file with these values, or the `tokenizer.json` beside it.

    Raises `DifferentModel` if that has other tokens, or if `transformers` does not know how the
    file's splits words.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokens = values["tokenizer.ggml.tokens"]
    if (path.parent / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(path.parent)
        vocab = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        if any(tokens[i : i + 1] != [token] for token, i in vocab.items()):
            raise DifferentModel("the tokenizer.json beside it has other tokens: remove it")
        for kind in ("bos", "eos"):
            number = values.get(f"tokenizer.ggml.{kind}_token_id")
            if number is not None and getattr(tokenizer, f"{kind}_token") is None:
                setattr(tokenizer, f"{kind}_token", tokens[number])
        tokenizer.chat_template = tokenizer.chat_template or values.get("tokenizer.chat_template")
        return tokenizer
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    splits = values.get("tokenizer.ggml.pre", "default")
    if splits in DIGIT_SPLITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    elif isinstance(backend.pre_tokenizer, ByteLevel) and splits not in GPT2_SPLITS:
        fix = "put its tokenizer.json beside it, or name its tokenizer by --tokenizer"
        if splits != "default":
            raise DifferentModel(f"its tokenizer splits words by the rules of {splits}: {fix}")
        print(f"{path} does not say how it splits words: as GPT-2, or {fix}", file=sys.stderr)
    if splits == "llama-bpe":
        backend.model.ignore_merges = True  # whole words of the vocabulary, as in Llama 3
    if splits == "qwen2":
        backend.normalizer = NFC()
    return tokenizer


def read_gguf(
    path: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> "tuple[LanguageModel, PreTrainedTokenizerBase]":
    """Loads the model, dequantized to fp32, and the tokenizer of a GGUF file by `transformers`.

    A given `tokenizer` is returned. The file's own may be a `tokenizer.json` beside it. Takes
    minutes if the vocabulary is large. Raises `ValueError` if the file is damaged, lacks tensors,
    has others than the model, or is part of a model, or if `transformers` or this package does not
    support the model, its rotary positions or its tokenizer.
    """
    from transformers import AutoConfig

    print(f"reading {path} to fp32, which takes minutes for a large vocabulary", file=sys.stderr)
    try:
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

        reader = GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        kind = values.get("general.type", "model")
        if kind != "model":
            raise DifferentModel(f"its type is {kind}: give the model itself")
        if "split.count" in values:
            raise DifferentModel("it is one part of a model: join them by llama-gguf-split --merge")
        if path.suffix != ".gguf":
            raise DifferentModel("transformers knows such files by .gguf: rename it")
        tokenizer = tokenizer or own_tokenizer(path, values)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        factors = tensors.pop("rope_freqs.weight", None)
        if factors or any(".rope.scal" in name for name in values):
            config.rope_parameters = scaled_rope(config, values, factors and factors.data)
        if "output.weight" in tensors:
            embedding = tensors["token_embd.weight"].data
            if np.array_equal(tensors["output.weight"].data, embedding):  # a copy of a tied head
                del tensors["output.weight"]
                config.tie_word_embeddings = True
        options = {"config": config, "output_loading_info": True}
        inner, report = open_class(path.parent, gguf_file=path.name, **options)
        read = {tensor.data_ptr(): tensor.numel() for tensor in inner.state_dict().values()}
        if sum(int(tensor.n_elements) for tensor in tensors.values()) > sum(read.values()):
            [arch] = (k for k, v in MODEL_ARCH_NAMES.items() if v == values["general.architecture"])
            known = get_tensor_name_map(arch, config.num_hidden_layers)
            for name in inner.state_dict():
                tensors.pop(known.get_name(name, (".weight", ".bias")), None)
            extra = min(tensors, default="output.weight")
            raise DifferentModel(f"the model of transformers does not have its {extra}")
    except DifferentModel as error:
        raise ValueError(f"{path} cannot be imported: {error}") from error
    except Exception as error:  # the libraries raise several types
        raise ValueError(
            f"transformers cannot read {path}: {sentence(error)}; it needs pip install "
            "'gguf>=0.17' 'transformers>=5.23', and a GGUF file of a model that it supports"
        ) from error
    if report["missing_keys"]:
        raise ValueError(f"{path} lacks {min(report['missing_keys'])}: download it again")
    inner.hf_quantizer = None  # the weights are no longer quantized
    inner.is_quantized = False
    del inner.config.quantization_config
    return AnyModel(any_config(inner.config.to_dict(), "of a GGUF file", None), inner), tokenizer
