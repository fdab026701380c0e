"""The on-disk token format: shards of token ids and a manifest that lists them.

A data folder holds `manifest.json`, the tokenizer as `tokenizer/` (Hugging Face files) and shards
`<split>_<number>.bin`. A shard is a header of 64 bytes, little-endian, and then the token ids:

    offset  size  content
         0     8  magic, b"GPT2TOKS"
         8     4  format version, 1 or 2
        12     4  bytes per token id: 2 (uint16) or 4 (uint32)
        16     8  number of token ids
        24    32  SHA-256 of the token ids' bytes
        56     8  zero

`manifest.json`:

    {"format": "gpt2_accel token shards", "version": 1,
     "tokenizer": {"name": …, "vocab_size": 50257, "fingerprint": SHA-256,
                   "end_of_text": 50256 or null},
     "dtype": "uint16",
     "source": description of the text, "revision": of a data set, "command": that made the folder,
     "separation": which tokens stand between documents, in words,
     "unknown": number of characters that the tokenizer does not give back,
     "special": special token in the text -> how often it is there, as ordinary text,
     "splits": {"train": {
                    "tokens": …, "documents": …, "bytes": UTF-8 bytes of its text,
                    "shards": [{"file": …, "tokens": …, "documents": …, "sha256": …}, …]},
                "val": …}}

`end_of_text` begins each document and occurs nowhere else; with some tokenizers another token ends
each (`tokenizer.document_marks`). In data of 0.4 it may be the unknown token. A split is one long
array of tokens; its shards are in the manifest's order.

Version 2 holds conversations (`conversations.py`), packed into windows of equal length. A token is
a uint32: its id, plus `COUNTS` if it counts in the loss, plus `STARTS` if it is the first of a
conversation. Padding has no bits. The manifest also has

     "sequence_length": tokens of a window, "model": its name,
     "template": SHA-256 of the tokenizer's chat template,
     "splits": {"train": {…, "bytes": null,
                          "targets": {"file": …, "tokens": windows, "sha256": …}}}

where `targets` is a version 1 shard with the number of counted tokens of each window. With
`"pairs": true` the first half of a window is a prompt with its chosen answer, the second half the
prompt with the rejected answer, and each window counts as 1.

The manifest of imported token files (`third_party.py`) has `"documents": null`, `"bytes": null`.

The manifest of a mixture has `"mixture": [{"data_dir": …, "weight": …}, …]` with paths relative to
it, and no shards; its version is 2 if a part has version 2. With `"phases": [{"from": share of the
run, "weights": […]}, …]` the weights change.
"""

import hashlib
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2_accel.data.documents import text_digest
from gpt2_accel.runtime.files import read_json, sync
from gpt2_accel.runtime.recipe_command import recipe_command
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

MAGIC = b"GPT2TOKS"
VERSION = 1
PACKED_VERSION = 2
# The bits of a token in version 2, above its id.
STARTS = np.uint32(1 << 30)
COUNTS = np.uint32(1 << 31)
TOKEN_ID = STARTS - 1
HEADER = struct.Struct("<8sIIQ32s8x")
TOKEN_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DATA_MANIFEST = "manifest.json"
MANIFEST_FORMAT = "gpt2_accel token shards"


class UnreadableData(OSError):
    """A shard has changed while it is in use, or can no longer be read."""


@dataclass
class ShardWriter:
    """Writes one shard in several calls of `append`, and the header last.

    A shard that was not closed has no magic, so it is never read as a complete one. `documents` is
    part of its entry in the manifest.
    """

    path: Path
    dtype: np.dtype
    version: int = VERSION
    tokens: int = 0
    documents: int = 0

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()
        self._file = open(self.path, "wb", 2**20)  # documents are short
        self._file.write(bytes(HEADER.size))

    def append(self, tokens: np.ndarray) -> None:
        """Appends tokens, (n,) integers that fit `dtype`."""
        data = np.ascontiguousarray(tokens, self.dtype).data
        self._digest.update(data)
        self._file.write(data)
        self.tokens += len(tokens)

    def close(self) -> dict:
        """Writes the header, syncs and closes the file; returns its entry in the manifest."""
        digest = self._digest.digest()
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, self.version, self.dtype.itemsize, self.tokens, digest))
        self._file.close()
        sync(self.path)
        return {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "sha256": digest.hex(),
        }


def read_shard(data_dir: Path, dtype: np.dtype, shard: dict, start: int, count: int) -> np.ndarray:
    """Returns tokens [start, start + count) of the file that the manifest lists as `shard`.

    (count,) of `dtype`. Each call opens the file and checks its header: open files do not grow with
    the number of shards, and a replaced file is noticed. A mapped file would kill the process if it
    is truncated. Raises `FileNotFoundError`, `ValueError` if the size or the header differs, and
    `UnreadableData` if the system does not return all bytes.
    """
    path = data_dir / shard["file"]
    end = HEADER.size + shard["tokens"] * dtype.itemsize
    wanted = count * dtype.itemsize
    try:
        with open(path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), wanted, HEADER.size + start * dtype.itemsize)
            size = os.fstat(file.fileno()).st_size  # afterwards: it is truncated at any time
            header = file.read(HEADER.size)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: remove the folder and prepare the data again"
        ) from None
    if size != end or header != HEADER.pack(
        MAGIC, header[8], dtype.itemsize, shard["tokens"], bytes.fromhex(shard["sha256"])
    ):
        raise ValueError(
            f"{path} is not the shard that the manifest lists, by its header or its size of "
            f"{size:,} bytes: restore it, or remove the folder and prepare the data again"
        )
    if len(data) != wanted:
        raise UnreadableData(f"{path} gave {len(data):,} of {wanted:,} bytes: try again")
    return np.frombuffer(data, dtype)


# The manifest


def read_manifest(data_dir: str | Path) -> dict:
    """Returns the manifest of a data folder, as in the module's docstring.

    Raises `FileNotFoundError` if there is none, `ValueError` if it is damaged or of another format.
    """
    path = Path(data_dir) / DATA_MANIFEST
    if not path.is_file():
        command = recipe_command("prepare-data")
        raise FileNotFoundError(
            f"{data_dir} is not prepared data, since {DATA_MANIFEST} is missing: prepare text by "
            f"{command} text FILE_OR_FOLDER --data_dir NEW_FOLDER, or another trainer's token "
            f"files by {command} import {data_dir} --data_dir NEW_FOLDER, then also a run on them "
            "goes on, by --data_dir NEW_FOLDER --ignore_changes"
        )
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        manifest = read_json(path)
        listed_shards(manifest)
        known = manifest["version"] in (VERSION, PACKED_VERSION)
        if known and manifest["format"] == MANIFEST_FORMAT and manifest["dtype"] in TOKEN_DTYPES:
            return manifest
    raise ValueError(f"{path} is damaged, or a newer release wrote it: prepare the data again")


def listed_shards(manifest: dict) -> list[dict]:
    """Returns the entries of all files of tokens in a manifest."""
    entries = []
    for split in manifest["splits"].values():
        entries += split["shards"]
        if "targets" in split:
            entries.append(split["targets"])
    return entries


class TokenStream:
    """One split of a data folder as one long array of tokens, across its shards.

    All shards are checked when it is opened. `tokens` is the length, `bytes` the UTF-8 bytes of the
    text (None if unknown), `unknown` the characters of the folder that its tokenizer does not give
    back, `vocab_size` the size of the vocabulary. `sequence_length` is the length of the windows of
    conversations, and `targets`, (windows,) int64, what each window counts; both are None for text.
    Raises `ValueError` if the split does not exist.
    """

    def __init__(self, data_dir: str | Path, split: str, manifest: dict | None = None):
        manifest = manifest or read_manifest(data_dir)
        splits = manifest["splits"]
        if split not in splits:
            raise ValueError(f"{data_dir} has no split {split!r}, only {', '.join(splits)}")
        entry = splits[split]
        self.data_dir = Path(data_dir)
        self.split = split
        self.tokens: int = entry["tokens"]
        self.bytes: int | None = entry["bytes"]
        self.unknown: int = manifest.get("unknown") or 0
        self.shards: list[dict] = entry["shards"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.sequence_length: int | None = manifest.get("sequence_length")
        self.dtype = TOKEN_DTYPES[manifest["dtype"]]
        self._ends = np.cumsum([shard["tokens"] for shard in self.shards], dtype=np.int64)
        for shard in self.shards:
            read_shard(self.data_dir, self.dtype, shard, 0, 0)
        self.targets: np.ndarray | None = None
        if self.sequence_length:
            shard = entry["targets"]
            targets = read_shard(self.data_dir, self.dtype, shard, 0, shard["tokens"])
            self.targets = targets.astype(np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns tokens [start, start + count) as (count,) int64, with the bits of version 2.

        Raises `ValueError` if a shard is not the listed one or a token id is not below
        `vocab_size`, and `OSError` if a shard cannot be read.
        """
        assert 0 <= start and start + count <= self.tokens, (start, count, self.tokens)
        pieces = [np.empty(0, np.int64)]
        number = int(np.searchsorted(self._ends, start, side="right"))
        while count:
            shard = self.shards[number]
            left = int(self._ends[number]) - start
            size = min(count, left)
            piece = read_shard(self.data_dir, self.dtype, shard, shard["tokens"] - left, size)
            ids = piece & TOKEN_ID if self.sequence_length else piece
            if ids.max(initial=0) >= self.vocab_size:
                path = self.data_dir / shard["file"]
                raise ValueError(
                    f"{path} holds the token id {ids.max()}, but the vocabulary has "
                    f"{self.vocab_size}: prepare the data again"
                )
            pieces.append(piece)
            start += size
            count -= size
            number += 1
        return np.concatenate(pieces)


def template_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the SHA-256 (hex) of a tokenizer's chat template."""
    return text_digest(str(tokenizer.chat_template))


# Mixtures


def read_parts(folder: Path, manifest: dict) -> list[tuple[Path, dict, float]]:
    """Returns the parts of a mixture: folder, manifest and weight; the weights sum to 1.

    Other data is one part, the folder itself with its manifest. Raises `FileNotFoundError` or
    `ValueError` if the manifest of a part is missing or damaged, or has changed since it was mixed.
    """
    if "mixture" not in manifest:
        return [(folder, manifest, 1.0)]
    weights = {folder / part["data_dir"]: part["weight"] for part in manifest["mixture"]}
    parts = {part: read_manifest(part) for part in weights}
    check_same({folder: manifest} | parts)
    total = sum(weights.values())
    return [(part, parts[part], weight / total) for part, weight in weights.items()]


def check_same(manifests: dict[Path, dict]) -> None:
    """Raises `ValueError` if the tokenizers, window lengths or chat templates differ."""
    expected: dict[str, str | int] = {}
    for folder, manifest in manifests.items():
        values = {name: manifest.get(name) for name in ("sequence_length", "template")}
        values["tokenizer"] = manifest["tokenizer"]["fingerprint"]
        for name, value in values.items():
            if value is not None and expected.setdefault(name, value) != value:
                raise ValueError(
                    f"{folder} has another {name} than the rest of the mixture: prepare all with "
                    "the same"
                )
