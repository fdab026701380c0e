"""Reads the token files of other trainers without a conversion: nanoGPT, build-nanogpt, llm.c.

| trainer       | files                          | content                                              |
|---------------|--------------------------------|------------------------------------------------------|
| nanoGPT       | `train.bin`, `val.bin`         | uint16 ids, no header                                |
| build-nanogpt | `edufineweb_train_000001.npy`  | numpy, uint16                                        |
| llm.c         | `fineweb_train_000001.bin`     | 256 int32 (20240520, version 1, tokens), uint16 ids  |

All three hold ids of GPT-2's BPE. They have no checksums and no count of the text's bytes.
"""

import os
import re
import struct
from pathlib import Path

import numpy as np

from gpt2_accel.recipe_command import recipe_command
from gpt2_accel.tokenizer import GPT2_FINGERPRINT, GPT2_VOCAB_SIZE

NAME = re.compile(r"(?:.*_)?(train|val)(?:_\d+)?\.(?:bin|npy)")
LLMC_MAGIC, LLMC_VERSION = 20240520, 1
LLMC_HEADER = 256 * 4  # bytes
OWN_MAGIC = b"GPT2TOKS"  # of shards.py
OTHER_LLMC_MAGIC = 20240801  # llm.c's Llama 3 files


def third_party_manifest(data_dir: str | Path) -> dict | None:
    """Returns a manifest of a folder of such files, None if it holds none of them.

    Shards have an `offset` (in bytes) and no checksum. Raises `ValueError` for a file that does not hold GPT-2 tokens.
    """
    folder = Path(data_dir)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    matches = {name: match[1] for name in names if (match := NAME.fullmatch(name))}
    if not matches:
        return None
    if "meta.pkl" in names:
        raise ValueError(
            f"{folder} is one of nanoGPT's character-level data sets, whose vocabulary is in a pickle, "
            "which could run code: make it from the text, by prepare_data.py shakespeare-char --input"
        )
    splits: dict[str, dict] = {}
    for name, split in matches.items():
        entry = splits.setdefault(
            split, {"tokens": 0, "documents": None, "bytes": None, "shards": []}
        )
        shard = describe(folder / name)
        entry["shards"].append(shard)
        entry["tokens"] += shard["tokens"]
    return {
        "tokenizer": {
            "name": "gpt2",
            "vocab_size": GPT2_VOCAB_SIZE,
            "fingerprint": GPT2_FINGERPRINT,
            "end_of_text": GPT2_VOCAB_SIZE - 1,
        },
        "dtype": "uint16",
        "source": f"{folder} as it is",
        "splits": splits,
    }


def describe(path: Path) -> dict:
    """Returns the entry of one file: its name, number of tokens and the offset of the first token, in bytes."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if path.suffix == ".npy":
            tokens, offset = read_npy_header(path, file)
        else:
            if file.read(8) == OWN_MAGIC:
                raise FileNotFoundError(
                    f"{path.parent}/manifest.json is missing beside {path.name}: prepare the data first, "
                    f"by {recipe_command('prepare_data')}"
                )
            file.seek(0)
            magic, version, count = struct.unpack("<3i", (file.read(12) + bytes(12))[:12])
            if magic == OTHER_LLMC_MAGIC:
                raise ValueError(f"{path} holds tokens of Llama 3, not of GPT-2: remove it")
            is_llmc = magic == LLMC_MAGIC and version == LLMC_VERSION
            tokens, offset = (count, LLMC_HEADER) if is_llmc else (size // 2, 0)
    if size != offset + 2 * tokens:
        raise ValueError(
            f"{path} has {size} bytes, but {tokens} tokens take {offset + 2 * tokens}: it is truncated or "
            "not a token file, fetch it again or remove it"
        )
    return {"file": path.name, "tokens": tokens, "offset": offset, "sha256": None}


def read_npy_header(path: Path, file) -> tuple[int, int]:
    """Returns the number of tokens of a numpy file and the offset of the first, in bytes."""
    try:
        version = np.lib.format.read_magic(file)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, _, dtype = read[version[0]](file)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a numpy file of tokens: remove it") from error
    if len(shape) != 1 or dtype != np.uint16:
        raise ValueError(
            f"{path} holds {dtype} of shape {shape}, not uint16 of shape (tokens,): remove it"
        )
    return shape[0], file.tell()
