"""Reads the token files of other trainers without a conversion.

| trainer                | files                                | content                                                |
|------------------------|--------------------------------------|--------------------------------------------------------|
| nanoGPT                | `train.bin`, `val.bin`               | uint16 ids, no header                                  |
| llm.c, modded-nanogpt  | `fineweb_train_000001.bin`           | 256 int32 (20240520, version 1, tokens), uint16 ids    |

They hold ids of GPT-2's BPE, and say by their names which split they belong to. datatrove's `.ds` files with ids of GPT-2's BPE
are of nanoGPT's kind under such a name. None has checksums or a count of the text's bytes.
"""

import math
import os
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from gpt2_accel.recipe_command import recipe_command
from gpt2_accel.tokenizer import GPT2_FINGERPRINT, GPT2_VOCAB_SIZE

NAME = re.compile(r"(?:.*_)?(train|val)(?:_\d+)?\.bin")
LLMC = [20240520, 1]  # magic and version
LLMC_HEADER = 256 * 4  # bytes
OWN_MAGIC = b"GPT2TOKS"  # of shards.py
GPT2 = {
    "name": "gpt2",
    "vocab_size": GPT2_VOCAB_SIZE,
    "fingerprint": GPT2_FINGERPRINT,
    "end_of_text": GPT2_VOCAB_SIZE - 1,
}


def third_party_manifest(folder: Path) -> dict | None:
    """Returns a manifest of a folder of such files, None if it holds none of them.

    Shards have an `offset` (in bytes) and no checksum. Raises `ValueError` for files that cannot be read as such.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    splits: dict[str, dict] = defaultdict(
        lambda: {"tokens": 0, "documents": None, "bytes": None, "shards": []}
    )
    for name in names:
        if match := NAME.fullmatch(name):
            shard = find_tokens(folder / name)
            splits[match[1]]["shards"].append(shard)
            splits[match[1]]["tokens"] += shard["tokens"]
    if splits and "meta.pkl" in names:
        raise ValueError(
            f"{folder} is one of nanoGPT's character-level data sets, whose vocabulary is in a pickle, "
            "which could run code: make it from the text, by prepare_data.py shakespeare-char --input"
        )
    about = {"version": 1, "tokenizer": GPT2, "dtype": "uint16", "source": f"{folder} as it is"}
    return {**about, "splits": dict(splits)} if splits else None


def find_tokens(path: Path) -> dict:
    """Returns the manifest's entry of nanoGPT's or llm.c's file."""
    with open(path, "rb") as file:
        start = file.read(12)
    if start.startswith(OWN_MAGIC):
        raise FileNotFoundError(
            f"{path.parent}/manifest.json is missing beside {path.name}: prepare the data first, by "
            f"{recipe_command('prepare_data')}"
        )
    *kind, tokens = np.frombuffer(start.ljust(12, b"\0"), "<i4").tolist()
    offset = LLMC_HEADER
    if kind != LLMC:
        # Rounded up, so that a file that ends in the middle of a token is refused when it is opened.
        tokens, offset = math.ceil(path.stat().st_size / 2), 0
    return {"file": path.name, "tokens": tokens, "offset": offset, "sha256": None}
