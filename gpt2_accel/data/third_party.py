"""Reads the token files of other trainers without a conversion.

| trainer                | files                                | content                                                |
|------------------------|--------------------------------------|--------------------------------------------------------|
| nanoGPT                | `train.bin`, `val.bin`               | uint16 ids, no header                                  |
| llm.c, modded-nanogpt  | `fineweb_train_000001.bin`           | 256 int32 (20240520, version 1, tokens), uint16 ids    |
| datatrove              | `00000_00000_doc_shuffled.ds` and    | uint16 or uint32 ids; `TOKENIZER|BYTES PER ID` and the |
|                        | `….ds.metadata`                      | number of tokens, a line each                          |

The first two hold ids of GPT-2's BPE, and say by their names which split they belong to. datatrove's are what its
`DocumentTokenizer` or `DocumentTokenizerMerger` writes with any tokenizer. The last 5% of their tokens, at most
`MOST_HELD_OUT`, are the validation split. None has checksums or a count of the text's bytes.
"""

import functools
import math
import os
import re
from collections import defaultdict
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
GPT2_NAMES = "gpt2", "openai-community/gpt2"
GPT2 = {
    "name": "gpt2",
    "vocab_size": GPT2_VOCAB_SIZE,
    "fingerprint": GPT2_FINGERPRINT,
    "end_of_text": GPT2_VOCAB_SIZE - 1,
}


def third_party_manifest(folder: Path) -> dict | None:
    """Returns a manifest of a folder of such files, None if it holds none of them.

    Shards have an `offset` (in bytes) and no checksum. Raises `ValueError` for files that cannot be read as such, and
    `FileNotFoundError` if datatrove's tokenizer is not found.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if datatrove := [name for name in names if name.endswith(".ds")]:
        return datatrove_manifest(folder, datatrove)
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


def datatrove_manifest(folder: Path, names: list[str]) -> dict:
    """Returns the manifest of a folder in which datatrove wrote the files `names`."""
    sizes, kinds = {}, set()
    for name in names:
        try:
            kind, tokens, *_ = (folder / f"{name}.metadata").read_text().splitlines()
            sizes[name] = int(tokens)
            kinds.add(kind)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{folder / name} has no readable {name}.metadata, which names its tokenizer: let datatrove finish"
            ) from error
    if len(kinds) > 1:
        raise ValueError(
            f"{folder} holds tokens of several tokenizers, {sorted(kinds)}: give each a folder"
        )
    source, _, width = kinds.pop().partition("|")
    dtype = np.dtype(f"<u{width or 2}")  # older versions have no width
    tokenizer, total = named_tokenizer(source, folder / "tokenizer"), sum(sizes.values())
    left = total - min(total // 20, MOST_HELD_OUT)  # tokens for training
    counts = {"train": left, "val": total - left}
    splits = {
        split: {"tokens": tokens, "documents": None, "bytes": None, "shards": []}
        for split, tokens in counts.items()
    }
    for name, tokens in sizes.items():
        train = min(tokens, left)
        left -= train
        for split, count, start in (("train", train, 0), ("val", tokens - train, train)):
            entry = {
                "file": name,
                "tokens": count,
                "offset": start * dtype.itemsize,
                "sha256": None,
            }
            splits[split]["shards"].append(entry)
        end = (folder / name).stat().st_size - dtype.itemsize
        last = np.fromfile(folder / name, dtype, offset=max(0, end))
        if tokens and last.tolist() != [tokenizer["end_of_text"]]:
            tokenizer = {**tokenizer, "end_of_text": None}  # documents are not separated
    about = {"version": 1, "tokenizer": tokenizer, "dtype": dtype.name, "splits": splits}
    return {**about, "source": f"{folder} as it is"}


@functools.lru_cache(maxsize=4)
def named_tokenizer(name: str, folder: Path) -> dict:
    """Returns the manifest's entry of `find_tokenizer`, with the token that separates documents."""
    if name in GPT2_NAMES:
        return GPT2
    tokenizer = find_tokenizer(name, folder)
    about = {"name": name, "vocab_size": len(tokenizer), "fingerprint": fingerprint(tokenizer)}
    return {**about, "end_of_text": text_start(tokenizer)}


def find_tokenizer(name: str, folder: Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer in `folder`, if there is one, else the one called `name`: GPT-2's, that of a directory or Hub
    id, or a `tokenizer.json`. Raises `FileNotFoundError` if it is not found, and the errors of `load_tokenizer`."""
    if folder.is_dir():
        return load_tokenizer(folder)
    if name in GPT2_NAMES:
        return gpt2_tokenizer()
    try:
        return load_tokenizer(Path(name).parent if Path(name).is_file() else name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: put the files of the tokenizer into {folder}") from error
