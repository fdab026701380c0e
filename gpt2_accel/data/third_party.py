"""Reads the token files of other trainers without a conversion.

| trainer                | files                                | content                                                |
|------------------------|--------------------------------------|--------------------------------------------------------|
| nanoGPT                | `train.bin`, `val.bin`               | uint16 ids, no header                                  |
| llm.c, modded-nanogpt  | `fineweb_train_000001.bin`           | 256 int32 (20240520, version 1, tokens), uint16 ids    |
| datatrove              | `00000_00000_doc_shuffled.ds` and    | uint16 or uint32 ids; `TOKENIZER|BYTES PER ID` and the |
|                        | `….ds.metadata`                      | number of tokens, a line each                          |

The first two hold ids of GPT-2's BPE, and say by their names which split they belong to. datatrove's are what its
`DocumentTokenizer` or `DocumentTokenizerMerger` writes with any tokenizer. The last 5% of their tokens, at most
`MOST_HELD_OUT`, are the validation split.

None has checksums or a count of the text's bytes.
"""

import functools
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
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

NAME = re.compile(r"(?:.*_)?(train|val)(?:_\d+)?\.bin")
LLMC = [20240520, 1]  # magic and version
LLMC_HEADER = 256 * 4  # bytes
OWN_MAGIC = b"GPT2TOKS"  # of shards.py
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

    Shards have an `offset` (in bytes) and no checksum. Raises `ValueError` for files that cannot be read as such, and `FileNotFoundError` if datatrove's tokenizer is not found.
    """
    folder = Path(data_dir)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if datatrove := [name for name in names if name.endswith(".ds")]:
        return datatrove_manifest(folder, datatrove)
    shards: dict[str, list[dict]] = defaultdict(list)
    for name in names:
        if match := NAME.fullmatch(name):
            shards[match[1]].append(find_tokens(folder / name))
    if shards and "meta.pkl" in names:
        raise ValueError(
            f"{folder} is one of nanoGPT's character-level data sets, whose vocabulary is in a pickle, "
            "which could run code: make it from the text, by prepare_data.py shakespeare-char --input"
        )
    return manifest(folder, GPT2, 2, shards) if shards else None


def manifest(folder: Path, tokenizer: dict, width: int, shards: Mapping[str, list[dict]]) -> dict:
    """Returns the manifest of a folder whose splits have the given `shards`, of `width` bytes per token."""
    splits = {}
    for split, entries in shards.items():
        tokens = sum(entry["tokens"] for entry in entries)
        splits[split] = {"tokens": tokens, "documents": None, "bytes": None, "shards": entries}
    about = {"dtype": f"uint{8 * width}", "source": f"{folder} as it is"}
    return {"tokenizer": tokenizer, **about, "splits": splits}


def shard_entry(path: Path, tokens: int, offset: int) -> dict:
    """Returns the entry of a shard in a file."""
    return {"file": path.name, "tokens": tokens, "offset": offset, "sha256": None}


def find_tokens(path: Path) -> dict:
    """Returns the entry of nanoGPT's or llm.c's file."""
    with open(path, "rb") as file:
        start = file.read(12)
    if start.startswith(OWN_MAGIC):
        raise FileNotFoundError(
            f"{path.parent}/manifest.json is missing beside {path.name}: prepare the data first, by "
            f"{recipe_command('prepare_data')}"
        )
    *kind, tokens = np.frombuffer(start.ljust(12, b"\0"), "<i4").tolist()
    if kind == LLMC:
        return shard_entry(path, tokens, LLMC_HEADER)
    # Rounded up, so that a file that ends in the middle of a token is refused when it is opened.
    return shard_entry(path, math.ceil(path.stat().st_size / 2), 0)


def datatrove_manifest(folder: Path, names: list[str]) -> dict:
    """Returns the manifest of a folder in which datatrove wrote the files `names`."""
    sizes: dict[Path, int] = {}
    kinds = set()
    for path in (folder / name for name in names):
        try:
            kind, tokens, *_ = Path(f"{path}.metadata").read_text().splitlines()
            source, _, width = kind.partition("|")
            sizes[path] = int(tokens)
            kinds.add((source, {"": 2, "2": 2, "4": 4}[width]))  # older versions have no width
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path} has no readable {path.name}.metadata, which names its tokenizer: let datatrove finish"
            ) from error
    if len(kinds) > 1:
        raise ValueError(
            f"{folder} holds tokens of several tokenizers, {sorted(kinds)}: give each a folder"
        )
    ((source, width),) = kinds
    total = sum(sizes.values())
    left = total - min(total // 20, MOST_HELD_OUT)  # tokens for training
    shards: dict[str, list[dict]] = {"train": [], "val": []}
    tokenizer = named_tokenizer(source, folder / "tokenizer")
    for path, tokens in sizes.items():
        first = min(tokens, left)
        left -= first
        shards["train"].append(shard_entry(path, first, 0))
        shards["val"].append(shard_entry(path, tokens - first, first * width))
        last = np.fromfile(path, f"<u{width}", offset=max(0, path.stat().st_size - width))
        if tokens and last.tolist() != [tokenizer["end_of_text"]]:  # documents are not separated
            tokenizer = {**tokenizer, "end_of_text": None}
    return manifest(folder, tokenizer, width, shards)


@functools.lru_cache(maxsize=4)
def named_tokenizer(name: str, folder: Path) -> dict:
    """Returns the manifest's entry of `find_tokenizer`, with the token that separates documents."""
    if name in GPT2_NAMES:
        return GPT2
    tokenizer = find_tokenizer(name, folder)
    return tokenizer_entry(tokenizer, name, text_start(tokenizer))


def tokenizer_entry(
    tokenizer: "PreTrainedTokenizerBase", name: str, end_of_text: int | None
) -> dict:
    """Returns the manifest's entry of a tokenizer; `end_of_text` is the token that separates documents."""
    mark = fingerprint(tokenizer)
    return {
        "name": "gpt2" if mark == GPT2_FINGERPRINT else name,
        "vocab_size": len(tokenizer),
        "fingerprint": mark,
        "end_of_text": end_of_text,
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
