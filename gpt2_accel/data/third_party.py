"""Reads the token files of other trainers without a conversion.

| trainer                | files                                | content                                                |
|------------------------|--------------------------------------|--------------------------------------------------------|
| nanoGPT                | `train.bin`, `val.bin`               | uint16 ids, no header                                  |
| build-nanogpt          | `edufineweb_train_000001.npy`        | numpy, uint16                                          |
| llm.c, modded-nanogpt  | `fineweb_train_000001.bin`           | 256 int32 (20240520, version 1, tokens), uint16 ids    |
| datatrove              | `00000_00000_doc_shuffled.ds` and    | uint16 or uint32 ids; `TOKENIZER|BYTES PER ID` and the |
|                        | `….ds.metadata`                      | number of tokens, a line each                          |

The first three hold ids of GPT-2's BPE, and say by their names which split they belong to. datatrove's are what its
`DocumentTokenizer` or `DocumentTokenizerMerger` writes with any tokenizer. The last 5% of their tokens, at most
`MOST_HELD_OUT`, are the validation split.

None has checksums or a count of the text's bytes.
"""

import functools
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.recipe_command import recipe_command
from gpt2_accel.tokenizer import (
    GPT2_FINGERPRINT,
    GPT2_VOCAB_SIZE,
    fingerprint,
    gpt2_tokenizer,
    load_tokenizer,
    text_start,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = re.compile(r"(?:.*_)?(train|val)(?:_\d+)?\.(?:bin|npy)")
LLMC_MAGIC, LLMC_VERSION = 20240520, 1
LLMC_HEADER = 256 * 4  # bytes
OWN_MAGIC = b"GPT2TOKS"  # of shards.py
OTHER_LLMC_MAGIC = 20240801  # llm.c's Llama 3 files
MOST_HELD_OUT = 10_000_000  # tokens
GPT2_NAMES = ("gpt2", "openai-community/gpt2")
GPT2 = {
    "name": "gpt2",
    "vocab_size": GPT2_VOCAB_SIZE,
    "fingerprint": GPT2_FINGERPRINT,
    "end_of_text": GPT2_VOCAB_SIZE - 1,
}


def third_party_manifest(data_dir: str | Path) -> dict | None:
    """Returns a manifest of a folder of such files, None if it holds none of them.

    Shards have an `offset` (in bytes) and no checksum. Raises `ValueError` for a file that is not complete or does not
    hold the tokens that its name promises, and `FileNotFoundError` if datatrove's tokenizer is not found.
    """
    folder = Path(data_dir)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    matches = {name: match[1] for name in names if (match := NAME.fullmatch(name))}
    if datatrove := [name for name in names if name.endswith(".ds")]:
        return datatrove_manifest(folder, datatrove)
    if not matches:
        return None
    if "meta.pkl" in names:
        raise ValueError(
            f"{folder} is one of nanoGPT's character-level data sets, whose vocabulary is in a pickle, "
            "which could run code: make it from the text, by prepare_data.py shakespeare-char --input"
        )
    shards: dict[str, list[dict]] = {}
    for name, split in matches.items():
        shards.setdefault(split, []).append(describe(folder / name))
    return manifest(folder, GPT2, "uint16", shards)


def manifest(folder: Path, tokenizer: dict, dtype: str, shards: dict[str, list[dict]]) -> dict:
    """Returns the manifest of a folder whose splits have the given `shards`."""
    return {
        "tokenizer": tokenizer,
        "dtype": dtype,
        "source": f"{folder} as it is",
        "splits": {
            split: {
                "tokens": sum(entry["tokens"] for entry in entries),
                "documents": None,
                "bytes": None,
                "shards": entries,
            }
            for split, entries in shards.items()
        },
    }


def describe(path: Path) -> dict:
    """Returns the entry of one file: its name, number of tokens and the offset of the first token, in bytes."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if path.suffix == ".npy":
            tokens, offset = read_npy_header(path)
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
    check_size(path, offset + 2 * tokens, tokens)
    return {"file": path.name, "tokens": tokens, "offset": offset, "sha256": None}


def check_size(path: Path, expected: int, tokens: int) -> None:
    """Raises `ValueError` if a file with `tokens` tokens has not the `expected` bytes."""
    if (size := path.stat().st_size) != expected:
        raise ValueError(
            f"{path} has {size} bytes, but {tokens} tokens take {expected}: it is truncated or "
            "not a token file, fetch it again or remove it"
        )


def read_npy_header(path: Path) -> tuple[int, int]:
    """Returns the number of tokens of a numpy file and the offset of the first, in bytes."""
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} is not a complete numpy file of tokens: fetch it again or remove it"
        ) from error
    if tokens.ndim != 1 or tokens.dtype != np.uint16:
        raise ValueError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}, not uint16 of shape (tokens,): remove it"
        )
    return len(tokens), tokens.offset


def datatrove_manifest(folder: Path, names: list[str]) -> dict:
    """Returns the manifest of a folder in which datatrove wrote the files `names`."""
    sizes: dict[str, int] = {}
    kinds = set()
    for name in names:
        try:
            kind, tokens, *_ = (folder / f"{name}.metadata").read_text().splitlines()
            source, _, width = kind.partition("|")  # without a width in older versions
            sizes[name], width = int(tokens), {"": 2, "2": 2, "4": 4}[width]
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ValueError(
                f"{folder / name} has no readable {name}.metadata, which names its tokenizer: let datatrove finish, or "
                "write the lines 'TOKENIZER|BYTES PER TOKEN' and the number of tokens there"
            ) from error
        check_size(folder / name, width * sizes[name], sizes[name])
        kinds.add((source, width))
    if len(kinds) > 1:
        raise ValueError(
            f"{folder} holds tokens of several tokenizers, {sorted(kinds)}: give each a folder"
        )
    total = sum(sizes.values())
    left = total - min(total // 20, MOST_HELD_OUT)  # tokens for training
    shards: dict[str, list[dict]] = {"train": [], "val": []}
    for name, tokens in sizes.items():
        first = min(tokens, left)
        left -= first
        for split, start, end in (("train", 0, first), ("val", first, tokens)):
            if start < end:
                place = {"file": name, "tokens": end - start, "offset": start * width}
                shards[split].append({**place, "sha256": None})
        if tokens:
            last = np.fromfile(folder / name, f"<u{width}", 1, offset=(tokens - 1) * width)
    tokenizer = tokenizer_entry(source, folder / "tokenizer")
    if not total or last[0] != tokenizer["end_of_text"]:  # documents are not separated
        tokenizer = {**tokenizer, "end_of_text": None}
    return manifest(folder, tokenizer, f"uint{8 * width}", shards)


@functools.lru_cache(maxsize=4)
def tokenizer_entry(name: str, folder: Path) -> dict:
    """Returns the manifest's entry of `find_tokenizer`, with the token that separates documents."""
    if name in GPT2_NAMES:
        return GPT2
    tokenizer = find_tokenizer(name, folder)
    return {
        "name": name,
        "vocab_size": len(tokenizer),
        "fingerprint": fingerprint(tokenizer),
        "end_of_text": text_start(tokenizer),
    }


def find_tokenizer(name: str, folder: Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer in `folder`, if there is one, else the one called `name`: GPT-2's, that of a directory or Hub
    id, or a `tokenizer.json`.

    Raises `FileNotFoundError` if it is not found, and the errors of `load_tokenizer`.
    """
    if not folder.is_dir() and name in GPT2_NAMES:
        return gpt2_tokenizer()
    named = Path(name).parent if Path(name).is_file() else name
    try:
        return load_tokenizer(folder if folder.is_dir() else named)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: put the files of the tokenizer into {folder}") from error
