"""Tokenizers: GPT-2's BPE, a BPE trained on the user's text, bytes, characters.

Each is a Hugging Face tokenizer: `save_pretrained` writes it beside the weights, and `AutoTokenizer` and `pipeline`
load it.
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
LARGEST_BPE = 2**20  # tokens; the trainer allocates memory for all of them at once
# `fingerprint` of GPT-2's BPE; tiktoken gives the same ids.
GPT2_FINGERPRINT = "98de00669996e48e8db9590e7c13d37461bb11178e80fa2abcafb3e49f542baf"


def gpt2_tokenizer() -> PreTrainedTokenizerBase:
    """Returns GPT-2's byte-level BPE of 50,257 tokens, built from tiktoken's copy.

    tiktoken downloads the vocabulary once, to `TIKTOKEN_CACHE_DIR` if that is set.
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
    """Returns tiktoken's `gpt2` encoding. Raises `OSError` if it is neither cached nor reachable."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the HTTP client raises
        raise OSError(
            "tiktoken cannot load GPT-2's vocabulary: connect to a network once, or set "
            f"TIKTOKEN_CACHE_DIR to a folder that holds it ({error})"
        ) from error


def merged_pair(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Returns the two tokens whose merge is `token`, by applying the merges of lower rank."""
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
    """Returns the printable character of each byte in a byte-level BPE's vocabulary.

    OpenAI's mapping (`bytes_to_unicode` in GPT-2's encoder.py): printable Latin-1 characters map to themselves, the
    other bytes, in order, to the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Returns a tokenizer with one token per UTF-8 byte; ids equal the bytes, `<|endoftext|>` is 256."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return GPT2Tokenizer(vocab={**vocab, END_OF_TEXT: 256}, merges=[])


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE with GPT-2's word splitting on `texts`.

    `vocab_size` counts the 256 bytes and `<|endoftext|>`, the last id; a small corpus may yield fewer tokens.
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
    """Returns a tokenizer with one token per character of `text`, in code-point order, as in nanoGPT.

    It has no token for unknown characters and none for the end of a text. Encoding a character that is not in `text`
    raises an error.
    """
    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    characters = Tokenizer(models.WordLevel(vocab))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")  # m: with newlines
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of an HF directory or Hub id. Raises `FileNotFoundError` if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the library raises nothing narrower for a damaged file
        raise FileNotFoundError(
            f"{name} holds no tokenizer that transformers can load ({first_line(error)})"
        ) from error
    if not tokenizer.vocab_size:  # what the library makes of a model without one
        raise FileNotFoundError(
            f"{name} holds no tokenizer: put the files of the one that the model was trained with there"
        )
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, name: str | Path) -> None:
    """Raises `ValueError` if the model `name` has no row for some token of the tokenizer."""
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"{name} has a tokenizer of {len(tokenizer)} tokens, but a vocabulary of {vocab_size}: put "
            "the tokenizer there that the model was trained with"
        )


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of each text, on all cores. The literal `<|endoftext|>` is encoded as text.

    Raises `ValueError` for a character that is not in the vocabulary.
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
    """Returns a function that encodes one text on one core, to (tokens,) of an integer dtype.

    The literal `<|endoftext|>` is encoded as text. GPT-2's BPE uses tiktoken, which is several times faster.
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

    # No special token is allowed below. But without any, tiktoken searches for the empty string, which takes half as
    # long again.
    specials = {END_OF_TEXT: len(ranks)}
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=specials
    )
    return lambda text: encoding.encode_to_numpy(text, disallowed_special=())


def bytes_per_token(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Returns the number of UTF-8 bytes of each token, (vocabulary,) int64; 0 for special tokens.

    Exact for byte-level and character-level tokenizers, as all of this module are.
    """
    backend = tokenizer.backend_tokenizer
    byte_level = "ByteLevel" in str(json.loads(backend.to_str())["pre_tokenizer"])
    table = np.zeros(len(tokenizer), np.int64)
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        table[number] = len(token) if byte_level else len(token.encode())
    table[tokenizer.all_special_ids] = 0
    return table


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the SHA-256 (hex) of vocabulary and merges, equal for tokenizers that encode alike."""
    backend = tokenizer.backend_tokenizer
    vocab = sorted(backend.get_vocab(with_added_tokens=True).items())
    merges = json.loads(backend.to_str())["model"].get("merges", [])
    return hashlib.sha256(json.dumps([vocab, merges]).encode()).hexdigest()
