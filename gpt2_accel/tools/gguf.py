"""Exports a model and its tokenizer as one GGUF file, for llama.cpp and programs built on it.

Names and metadata are those of llama.cpp's converter, `convert_hf_to_gguf.py`, which does not know a tokenizer that
was trained here. llama.cpp uses the token embedding as the head where none is stored.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gpt2_accel.hf.convert import check_finite, conversion, special_ids, to_hf
from gpt2_accel.models import LanguageModel
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.tokenizer import PROBE, check_vocabulary, encode, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
# llama.cpp's name of a word splitting -> GPT-2's, and SmolLM2's, which also takes digits apart.
WORD_SPLITTINGS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
}


def write_gguf(
    model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", path: Path, name: str = ""
) -> None:
    """Writes the model in fp32 with its tokenizer. `name` is the model's name in the file.

    Raises `ValueError` if the package gguf is missing, the model is a class of `transformers`,
    llama.cpp lacks some part of the model (the exact GELU), a
    weight is NaN or infinite, or llama.cpp would encode some text differently than the tokenizer.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError("GGUF files need gguf: pip install 'gguf>=0.17'") from error

    config = model.config
    if isinstance(model, AnyModel):
        raise ValueError(
            f"GGUF files are written of the modules in models/, not of a {config.architecture} with "
            "transformers' class: use convert_hf_to_gguf.py of llama.cpp"
        )
    check_finite(model)
    check_vocabulary(tokenizer, config.vocab_size, name or "the model")
    writer = gguf.GGUFWriter(path, config.architecture)
    values = {
        "type": "model",
        "name": name,
        "block_count": config.n_layer,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "head_count": config.n_head,
        **conversion(config.architecture).gguf(config),
        "file_type": gguf.LlamaFileType.ALL_F32,
        "quantization_version": gguf.GGML_QUANT_VERSION,
        **tokenizer_values(tokenizer, config.vocab_size),
    }
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
    for key, tensor in gguf_tensors(model).items():
        writer.add_tensor(key, tensor.detach().to("cpu", torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Returns the weights by their GGUF name, as Linear weights."""
    import gguf

    config, table = model.config, conversion(model.config.architecture)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.architecture.upper()], config.n_layer)
    tensors = {}
    for key, tensor in to_hf(model).items():
        if key.endswith(table.transposed):
            tensor = tensor.t()
        if key.endswith(table.gguf_interleaved):
            halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))  # (heads, 2, D/2, C)
            tensor = halves.transpose(1, 2).flatten(0, 2)
        tensors[names.get_name(key, try_suffixes=(".weight", ".bias"))] = tensor
    return tensors


# The tokenizer


def tokenizer_values(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a byte-level BPE; rows of the model without a token get an unused one. Raises the error of
    `word_splitting`."""
    from gguf import TokenType

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe = backend["model"]
    splitting = word_splitting(tokenizer, bpe)
    names = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, i in bpe["vocab"].items():
        names[i], types[i] = token, TokenType.NORMAL
    for added in backend["added_tokens"]:
        names[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    values = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": splitting,
        "token_list": names,
        "token_types": types,
        "token_merges": [" ".join(pair) for pair in bpe["merges"]],
        "add_bos_token": bool(text_start(tokenizer, begins=False)),
        **special_ids(tokenizer, vocab_size),
    }
    if tokenizer.chat_template:
        values["chat_template"] = tokenizer.chat_template
    return values


def word_splitting(tokenizer: "PreTrainedTokenizerBase", model: dict) -> str:
    """Returns the word splitting with which llama.cpp's BPE encodes as the tokenizer, whose `model` its JSON has.

    Raises `ValueError` if none does.
    """
    if model["type"] == "BPE" and model["merges"] and tokenizer.eos_token_id is not None:
        [expected] = encode(tokenizer, [PROBE])
        plain = Tokenizer(models.BPE(model["vocab"], [tuple(pair) for pair in model["merges"]]))
        for name, splitting in WORD_SPLITTINGS.items():
            plain.pre_tokenizer = splitting
            if plain.encode(PROBE).ids == expected:
                return name
    raise ValueError(
        "llama.cpp cannot encode text as the tokenizer does, which is not a byte-level BPE with merges, GPT-2's or "
        "SmolLM2's word splitting and a token that ends a text: serve the model by transformers serve (docs/hub.md)"
    )
