"""Synthetic data: shards of random tokens, and text of random words."""

import random
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from gpt2_accel.data.prepare import prepare
from gpt2_accel.tokenizer import char_tokenizer

FIRST = 0x10000  # 65,536 characters without gaps start at this code point


def many_characters(vocab_size: int) -> PreTrainedTokenizerBase:
    """Returns a tokenizer of `vocab_size` characters, numbered from the code point `FIRST`."""
    return char_tokenizer("".join(map(chr, range(FIRST, FIRST + vocab_size))))


def random_shards(folder: str | Path, vocab_size: int, tokens: int) -> None:
    """Writes training shards of uniformly random tokens."""
    numbers = np.random.default_rng(0).integers(vocab_size, size=tokens)
    text = (numbers + FIRST).astype("<u4").tobytes().decode("utf-32-le")
    prepare({"train": [text]}, many_characters(vocab_size), folder, source="random characters")


def random_sentences(size: int) -> list[str]:
    """Returns documents of `size` characters in total, with about as many tokens per character as English.

    Words are random syllables, with frequencies by Zipf's law.
    """
    chance = random.Random(0)
    syllables = [a + b for a in "tshrnlmdcw" for b in ("a", "e", "i", "o", "er", "ing", "on", "ed")]
    words = [
        "".join(chance.choices(syllables, k=chance.choice((1, 1, 2, 2, 3)))) for _ in range(9999)
    ]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    sentences = []
    for _ in range(1000):
        sentence = " ".join(chance.choices(words, weights, k=chance.randint(5, 25)))
        sentences.append(sentence.capitalize() + chance.choice((". ", ". ", "? ", ".\n")))
    documents, total = [], 0
    while total < size:
        documents.append("".join(chance.choices(sentences, k=chance.randint(5, 60))))
        total += len(documents[-1])
    return documents
