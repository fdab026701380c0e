"""Reads the token files of other trainers without a conversion.

| trainer               | files                             | content                             |
|-----------------------|-----------------------------------|-------------------------------------|
| nanoGPT               | `train.bin`, `val.bin`            | uint16 ids                          |
| llm.c, modded-nanogpt | `fineweb_train_000001.bin`        | 256 int32 (magic, version, tokens), |
|                       |                                   | then the ids: `HEADERS`             |
| datatrove             | `00000_00000_doc_shuffled.ds` and | uint16 or uint32 ids; two lines:    |
|                       | `….ds.metadata`                   | `TOKENIZER|BYTES PER ID`, tokens    |

The names of the first two give the split. Their uint16 ids are of GPT-2's BPE, llm.c's uint32 ids
of the tokenizer in the folder's `tokenizer/`. datatrove's `DocumentTokenizer` and
`DocumentTokenizerMerger` write files with any tokenizer. The last 5% of their tokens, at most
`MOST_HELD_OUT`, are the validation split. None of these files has checksums or a count of the
text's bytes.
"""

import functools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_accel.tokenizer import (
    GPT2_FINGERPRINT,
    GPT2_VOCAB_SIZE,
    PreTrainedTokenizerBase,
    fingerprint,
    gpt2_tokenizer,
    load_tokenizer,
    text_ends,
    text_start,
)

NAME = re.compile(r"(?:.*_)?(train|val)(?:_\d+)?\.bin")
LLMC_HEADER = 256 * 4  # bytes
U2 = np.dtype("<u2")
U4 = np.dtype("<u4")
HEADERS: dict[tuple, np.dtype] = {(20240520, 1): U2, (20240801, 7): U4}  # magic and version -> ids
PROBED = 2048  # pairs of 16-bit values at each end of a file that show whether its ids are wider
OWN_MAGIC = b"GPT2TOKS"  # shards.py writes it
MOST_HELD_OUT = 10_000_000  # tokens
GPT2_NAMES = "gpt2", "openai-community/gpt2"
GPT2 = {
    "name": "gpt2",
    "vocab_size": GPT2_VOCAB_SIZE,
    "fingerprint": GPT2_FINGERPRINT,
    "end_of_text": GPT2_VOCAB_SIZE - 1,
}


File = tuple[str, str, int, int]
"""A part of a token file: split, file name, number of tokens, offset of the first in bytes."""


def third_party_manifest(folder: Path) -> dict | None:
    """Returns a manifest of a folder of other trainers' token files, None if it holds none.

    Shards have an `offset` (in bytes) and no checksum. Raises `ValueError` for files that cannot be
    read, and `FileNotFoundError` if datatrove's tokenizer is not found.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    datatrove = [name for name in names if name.endswith(".ds")]
    named = [name for name in names if NAME.fullmatch(name)]
    if datatrove:
        tokenizer, dtype, files = datatrove_files(folder, datatrove)
    elif named:
        tokenizer, dtype, files = named_files(folder, named)
    else:
        return None
    splits: dict[str, dict] = {}
    for split, name, tokens, offset in files:
        new: dict[str, Any] = {"tokens": 0, "documents": None, "bytes": None, "shards": []}
        entry = splits.setdefault(split, new)
        entry["tokens"] += tokens
        shard = {"file": name, "tokens": tokens, "offset": offset, "sha256": None}
        entry["shards"].append(shard)
    return {
        "version": 1,
        "tokenizer": tokenizer,
        "dtype": dtype.name,
        "splits": splits,
        "source": f"{folder} as it is",
    }


def named_files(folder: Path, names: list[str]) -> tuple[dict, np.dtype, list[File]]:
    """Returns the tokenizer's manifest entry, dtype and parts of nanoGPT's or llm.c's files."""
    if (folder / "meta.pkl").exists():
        raise ValueError(
            f"{folder} is one of nanoGPT's character-level data sets, whose vocabulary is in a "
            "pickle, which could run code: make it from the text, by prepare_data.py "
            "shakespeare-char --input"
        )
    files = []
    dtypes = set()
    for name in names:
        dtype, tokens, offset = find_tokens(folder / name)
        dtypes.add(dtype)
        match = NAME.fullmatch(name)
        assert match is not None
        files.append((match[1], name, tokens, offset))
    if dtypes == {U2}:
        return GPT2, U2, files
    tokenizer_dir = folder / "tokenizer"
    if U2 in dtypes or not tokenizer_dir.is_dir():
        raise ValueError(
            f"{folder} holds uint32 token ids, whose tokenizer is not named: give them a folder "
            "of their own, and put the tokenizer's files, such as tokenizer.json, into "
            f"{tokenizer_dir}"
        )
    # llm.c puts BOS before each document.
    return named_tokenizer("tokenizer/", tokenizer_dir, begins=True), U4, files


def find_tokens(path: Path) -> tuple[np.dtype, int, int]:
    """Returns dtype, number and offset (bytes) of the ids in nanoGPT's or llm.c's file."""
    with open(path, "rb") as file:
        start = file.read(12)
    if start.startswith(OWN_MAGIC):
        raise FileNotFoundError(
            f"{path.parent}/manifest.json is missing beside {path.name}: restore it, or prepare "
            "the data again"
        )
    *kind, tokens = np.frombuffer(start.ljust(12, b"\0"), "<i4").tolist()
    dtype = HEADERS.get(tuple(kind))
    if dtype:
        return dtype, tokens, LLMC_HEADER
    if kind[0] // 10_000 == 2024:  # GPT-2 has no ids with these bytes
        raise ValueError(
            f"{path} has a header of llm.c with magic and version {kind}, but token files have "
            f"one of {list(HEADERS)}: leave the file out, or write it again"
        )
    size = path.stat().st_size
    pairs = size // (2 * U2.itemsize)
    first = np.fromfile(path, U2, 2 * PROBED)
    last = np.fromfile(path, U2, 2 * PROBED, offset=4 * max(0, pairs - PROBED))
    upper = np.append(first[1::2], last[1::2])
    if pairs and (upper < 4).all():  # upper halves of 32-bit ids are that small
        raise ValueError(
            f"{path} holds token ids of more than 16 bits without a header: write them as llm.c "
            "does for Llama 3, or as uint16"
        )
    # Rounded up, so that a file that ends in the middle of a token is refused when it is opened.
    return U2, math.ceil(size / U2.itemsize), 0


def datatrove_files(folder: Path, names: list[str]) -> tuple[dict, np.dtype, list[File]]:
    """Returns the tokenizer's manifest entry, the dtype and the parts of datatrove's files."""
    sizes = {}
    kinds = set()
    for name in names:
        try:
            kind, size, *_ = (folder / f"{name}.metadata").read_text().splitlines()
            sizes[name] = int(size)
            kinds.add(kind)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{folder / name} has no readable {name}.metadata, which names its tokenizer: let "
                "datatrove finish"
            ) from error
    if len(kinds) > 1:
        raise ValueError(
            f"{folder} holds tokens of several tokenizers, {sorted(kinds)}: give each a folder"
        )
    source, _, width = kinds.pop().partition("|")
    dtype = np.dtype(f"<u{width or 2}")  # older versions have no width
    tokenizer = named_tokenizer(source, folder / "tokenizer")
    total = sum(sizes.values())
    left = total - min(total // 20, MOST_HELD_OUT)  # tokens for training
    files = []
    for name, tokens in sizes.items():
        train = min(tokens, left)
        left -= train
        files.append(("train", name, train, 0))
        files.append(("val", name, tokens - train, train * dtype.itemsize))
    return tokenizer, dtype, files


@functools.lru_cache(maxsize=4)
def named_tokenizer(name: str, folder: Path, begins: bool = False) -> dict:
    """Returns the manifest entry of a tokenizer that `find_tokenizer` loads.

    `end_of_text` is the token that begins each document if `begins`, else the one that follows it.
    """
    if name in GPT2_NAMES:
        return GPT2
    tokenizer = find_tokenizer(name, folder)
    marks = text_start(tokenizer) if begins else text_ends(tokenizer)[-1:]
    return tokenizer_entry(tokenizer, name, marks)


def tokenizer_entry(
    tokenizer: "PreTrainedTokenizerBase", name: str, marks: Sequence[int]
) -> dict[str, Any]:
    """Returns the manifest entry of a tokenizer; `marks` holds the token between documents."""
    return {
        "name": name,
        "vocab_size": len(tokenizer),
        "fingerprint": fingerprint(tokenizer),
        "end_of_text": marks[0] if marks else None,
    }


def find_tokenizer(name: str, folder: Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer in `folder` if there is one, else the tokenizer called `name`.

    `name` is a name of GPT-2, a directory, a Hub id or a `tokenizer.json`. Raises
    `FileNotFoundError` if it is not found, `ValueError` if it encodes differently in
    `transformers`.
    """
    if folder.is_dir():
        return load_tokenizer(folder)
    if name in GPT2_NAMES:
        return gpt2_tokenizer()
    try:
        return load_tokenizer(Path(name).parent if Path(name).is_file() else name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: put the files of the tokenizer into {folder}") from error
