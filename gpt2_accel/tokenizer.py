"""Tokenizers: GPT-2's BPE, a BPE trained on the user's text, bytes, characters.

Each is a Hugging Face tokenizer from the start, so that `save_pretrained` puts it beside the weights
and `AutoTokenizer` and `pipeline` load it from there.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from gpt2_accel.errors import first_line

END_OF_TEXT = "<|endoftext|>"
GPT2_VOCAB_SIZE = 50257
LARGEST_BPE = 2**20  # tokens; the trainer asks for memory for all of them at once
# `fingerprint` of GPT-2's own BPE, by which tiktoken is known to give the same ids.
GPT2_FINGERPRINT = "98de00669996e48e8db9590e7c13d37461bb11178e80fa2abcafb3e49f542baf"


def gpt2_tokenizer() -> PreTrainedTokenizerBase:
    """GPT-2's own byte-level BPE of 50,257 tokens, rebuilt from tiktoken's copy of it.

    tiktoken downloads the vocabulary once (`TIKTOKEN_CACHE_DIR` says where to keep it).
    """
    encoding = tiktoken_gpt2()
    symbols = byte_symbols()
    ranks = encoding._mergeable_ranks
    vocab = {"".join(symbols[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [
        tuple("".join(symbols[byte] for byte in part) for part in merged_pair(token, ranks))
        for token in ranks
        if len(token) > 1
    ]
    vocab[END_OF_TEXT] = encoding.eot_token
    return GPT2Tokenizer(vocab=vocab, merges=merges)


@functools.cache
def tiktoken_gpt2():
    """tiktoken's `gpt2` encoding. Raises `OSError` where neither its cache nor a network is there."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the HTTP client raises
        raise OSError(
            "tiktoken cannot load GPT-2's vocabulary: connect to a network once, or set "
            f"TIKTOKEN_CACHE_DIR to a folder that holds it ({error})"
        ) from error


def merged_pair(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens whose merge is `token`: what BPE makes of it with the merges of lower rank."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        candidates = [
            ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)
        ]
        i = candidates.index(min(candidates))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@functools.cache
def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE's vocabulary.

    OpenAI's mapping (`bytes_to_unicode` in GPT-2's encoder.py): printable Latin-1 stands for itself,
    the other bytes, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per UTF-8 byte, ids equal to the bytes, and `<|endoftext|>` as 256."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return GPT2Tokenizer(vocab={**vocab, END_OF_TEXT: 256}, merges=[])


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE with GPT-2's word splitting, trained on `texts`.

    `vocab_size` counts the 256 bytes and `<|endoftext|>`, the last id; a small corpus may yield fewer.
    Raises `ValueError` if it leaves no room for a merge or is above `LARGEST_BPE`.
    """
    if vocab_size > LARGEST_BPE:
        raise ValueError(
            f"a BPE vocabulary of {vocab_size:,} is more than the {LARGEST_BPE:,} that are trained here: "
            "lower vocab_size"
        )
    if vocab_size <= 257:
        raise ValueError(
            f"a BPE vocabulary of {vocab_size} has no room beside the 256 bytes and {END_OF_TEXT}: "
            "raise vocab_size above 257"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = {**trained["vocab"], END_OF_TEXT: len(trained["vocab"])}
    return GPT2Tokenizer(vocab=vocab, merges=[tuple(merge) for merge in trained["merges"]])


def char_tokenizer(text: str) -> PreTrainedTokenizerBase:
    """One token per character that occurs in `text`, in code-point order, as in nanoGPT.

    There is no token for an unknown character and none for the end of a text. Encoding a character
    that `text` does not hold raises an error.
    """
    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    characters = Tokenizer(models.WordLevel(vocab))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")  # m: with newlines
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an HF directory or Hub id; raises `FileNotFoundError` if there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the library raises nothing narrower for a damaged file
        raise FileNotFoundError(
            f"{name} holds no tokenizer that transformers can load ({first_line(error)})"
        ) from error


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, the literal `<|endoftext|>` taken as text, on all cores.

    Raises `ValueError` for a character that the tokenizer does not know.
    """
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    try:
        return [encoding.ids for encoding in backend.encode_batch(list(texts))]
    except Exception as error:  # the library raises nothing narrower
        known = backend.get_vocab(with_added_tokens=False).keys()
        unknown = sorted({character for text in texts for character in text} - known)
        raise ValueError(
            f"the tokenizer does not know the characters {unknown[:10]}: take them out of the text, "
            "or use a BPE or byte tokenizer, which know every character"
        ) from error
    finally:
        backend.encode_special_tokens = False


def token_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], np.ndarray]:
    """A function that gives the ids of a text, the literal `<|endoftext|>` taken as text, on one core:
    (tokens,) of some integer dtype. With GPT-2's BPE it is tiktoken's, which is several times faster.
    """
    if fingerprint(tokenizer) != GPT2_FINGERPRINT:
        return lambda text: np.array(encode(tokenizer, [text])[0], np.int64)
    import tiktoken

    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    ranks = {
        bytes(byte_of[symbol] for symbol in token): rank
        for token, rank in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).items()
        if token != END_OF_TEXT
    }
    from tiktoken_ext.openai_public import r50k_pat_str

    # No special token is allowed below. But without any tiktoken would look for the empty string, which is
    # everywhere: that takes half as long again.
    specials = {END_OF_TEXT: len(ranks)}
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=specials
    )
    return lambda text: encoding.encode_to_numpy(text, disallowed_special=())


def bytes_per_token(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The UTF-8 bytes of text that each id stands for, (vocabulary,) int64; 0 for special tokens.

    Exact for byte-level and character-level tokenizers, which all of this module are.
    """
    backend = tokenizer.backend_tokenizer
    byte_level = "ByteLevel" in str(json.loads(backend.to_str())["pre_tokenizer"])
    table = np.zeros(len(tokenizer), np.int64)
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        table[number] = len(token) if byte_level else len(token.encode())
    table[tokenizer.all_special_ids] = 0
    return table


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) of vocabulary and merges: equal for two tokenizers that encode alike."""
    backend = tokenizer.backend_tokenizer
    vocab = sorted(backend.get_vocab(with_added_tokens=True).items())
    merges = json.loads(backend.to_str())["model"].get("merges", [])
    return hashlib.sha256(json.dumps([vocab, merges]).encode()).hexdigest()
