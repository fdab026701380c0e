"""Tiny models: of the architectures in `models/`, and of other families of `transformers`."""

from pathlib import Path

import torch
from tables import table
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from gpt2_accel.models import ModelConfig, config_class
from gpt2_accel.tokenizer import byte_symbols, byte_tokenizer

TABLE = table("families")
SIZES, FAMILIES = TABLE["sizes"], TABLE["families"]


def own_shape(architecture: str, **changes: object) -> ModelConfig:
    """Returns a small shape of an architecture in `models/`."""
    sizes = {"vocab_size": 257, "n_positions": 48, "n_layer": 2, "n_head": 2, "n_embd": 32}
    if architecture != "gpt2":
        sizes |= {"n_kv_head": 1, "head_dim": 16, "n_inner": 64}
    return config_class(architecture)(**sizes | changes)


def family_model(kind: str, **changes: object) -> torch.nn.Module:
    """Builds a model of a family with random weights."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | FAMILIES.get(kind, {}) | changes)
    return AutoModelForCausalLM.from_config(config)


def save_family(kind: str, folder: Path, **changes: object) -> Path:
    """Saves a model of a family and a tokenizer of bytes; returns the folder."""
    family_model(kind, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def own_tokenizer(kind: str, texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains a tokenizer like those of a family: SentencePiece for Gemma, else byte-level BPE.

    It has an EOS. Unless Qwen's, SmolLM3's or NeoX's, it also has a padding token and a BOS, which
    it adds to a text.
    """
    begins = kind not in ("qwen3_moe", "smollm3", "gpt_neox")
    special = ["<bos>", "<eos>", "<pad>"] if begins else ["<eos>"]
    roles = {f"{name.strip('<>')}_token": name for name in special}
    if kind == "gemma3_text":
        bpe = Tokenizer(models.BPE(byte_fallback=True))
        bpe.normalizer = normalizers.Replace(" ", "\u2581")
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        bpe.decoder = decoders.Sequence(parts)
        first = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=first)
    else:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = list(byte_symbols())
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet
        )
    bpe.train_from_iterator(texts, trainer)
    if begins:
        bpe.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **roles)
