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
     "tokenizer": {"name": …, "vocab_size": 50257, "fingerprint": SHA-256, "end_of_text": 50256 or null},
     "dtype": "uint16",
     "source": description of the text, "revision": of a data set, "command": that made the folder,
     "counts": {"empty": …, "not_utf8": …, "literal_separator": …, "longest": …},   see tokenizing.COUNTS
     "first_not_utf8": place of the first document with bytes that are not UTF-8, or null,
     "splits": {"train": {"tokens": …, "documents": …, "bytes": UTF-8 bytes of its text,
                          "shards": [{"file": …, "tokens": …, "documents": …, "sha256": …}, …]},
                "val": …}}

If the tokenizer has `<|endoftext|>`, its id precedes each document and occurs nowhere else. A split is one long
array of tokens; its shards are in the manifest's order.

Version 2 holds conversations (`conversations.py`), packed into windows of equal length. A token is then a uint32: its id,
plus `COUNTS` if it counts in the loss, plus `STARTS` if it is the first of a conversation. The manifest has version 2 and
in addition

     "sequence_length": tokens of a window, "template": SHA-256 of the tokenizer's chat template, "model": its name,
     "first": {"empty": place of the first, …},   see conversations.COUNTS
     "splits": {"train": {…, "bytes": null, "counted": tokens, "padding": tokens,
                          "targets": {"file": …, "tokens": windows, "sha256": …}}}

where `targets` is a version 1 shard with the number of counted tokens of each window. Padding has no bits. Releases before 0.4 refuse version 2.

Folders of other trainers' token files (`third_party.py`) open like these. A folder may also be a mixture of others:
its manifest then holds `"mixture": [{"data_dir": …, "weight": …}, …]` with paths relative to it, and its splits have
no shards. It has version 2 if one of them has.
"""

import functools
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.data.third_party import OWN_MAGIC as MAGIC
from gpt2_accel.data.third_party import third_party_manifest
from gpt2_accel.files import atomic_directory, parse_json, write_json
from gpt2_accel.progress import progress
from gpt2_accel.recipe_command import recipe_command
from gpt2_accel.tokenizer import fingerprint, gpt2_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION, PACKED_VERSION = 1, 2
# The bits of a token in version 2, above its id.
STARTS, COUNTS = np.uint32(1 << 30), np.uint32(1 << 31)
TOKEN_ID = STARTS - np.uint32(1)
HEADER = struct.Struct("<8sIIQ32s8x")
MANIFEST = "manifest.json"
MANIFEST_FORMAT = "gpt2_accel token shards"
BLOCK = 2**22  # tokens read at once where all are read
OPEN_SHARDS = 64  # each needs a file descriptor, and a process often has only 1,024


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns uint16 if every id of the vocabulary fits, else uint32 (both little-endian)."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ShardWriter:
    """Writes one shard in several calls of `append`, and the header last.

    A shard that was not closed has no magic, so it is never read as a complete one.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, version: int = VERSION):
        self.path, self.dtype, self.version = Path(path), np.dtype(dtype), version
        self.tokens = 0
        self._digest = hashlib.sha256()
        self._file = open(self.path, "wb")
        self._file.write(bytes(HEADER.size))

    def append(self, tokens: np.ndarray) -> None:
        """Appends tokens, (n,) integers that fit `dtype`."""
        data = tokens.astype(self.dtype, copy=False).tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.tokens += len(tokens)

    def close(self) -> dict:
        """Writes the header and closes the file; returns its entry in the manifest."""
        digest = self._digest.digest()
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, self.version, self.dtype.itemsize, self.tokens, digest))
        self._file.close()
        return {"file": self.path.name, "tokens": self.tokens, "sha256": digest.hex()}


def read_header(path: Path) -> tuple[int, int, str]:
    """Returns the bytes per token, the number of tokens and the SHA-256 (hex) in a shard's header.

    Raises `FileNotFoundError` if the shard is missing, `ValueError` if it has another format or another size than its
    header says.
    """
    hint = "prepare the data again"
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {hint}") from None
    if len(header) < HEADER.size:
        raise ValueError(f"{path} is truncated within its header: {hint}")
    magic, version, width, tokens, digest = HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(f"{path} is not a token shard (it starts with {magic!r}): {hint}")
    if version not in (VERSION, PACKED_VERSION):
        raise ValueError(
            f"{path} has format version {version}, this release reads {VERSION} and {PACKED_VERSION}: {hint}"
        )
    if width not in (2, 4):
        raise ValueError(f"{path} has {width} bytes per token, expected 2 or 4: {hint}")
    expected = HEADER.size + tokens * width
    if size != expected:
        raise ValueError(f"{path} has {size} bytes, its header says {expected}: {hint}")
    return width, tokens, digest.hex()


class UnreadableData(OSError):
    """A shard has changed while it is in use, or can no longer be read."""


class Shard:
    """The token ids of an open shard: `tokens` ids of `dtype` from byte `offset` of its file.

    They are read by `pread`, not mapped: a mapped file that is truncated kills the process. Several threads may read.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, tokens: int, offset: int):
        self.path, self.dtype, self.tokens, self.offset = Path(path), dtype, tokens, offset
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns the tokens [start, start + count), (count,). Raises `UnreadableData` if the file no longer has them."""
        size = self.dtype.itemsize
        place, left = self.offset + start * size, count * size
        parts = []
        while left:
            try:
                part = os.pread(self._descriptor, left, place)
            except OSError as error:
                raise UnreadableData(f"{self.path} cannot be read: {error.strerror}") from error
            if not part:
                size = os.fstat(self._descriptor).st_size
                raise UnreadableData(
                    f"{self.path} was truncated to {size:,} bytes while it was in use: restore it or prepare the data "
                    "again"
                )
            parts.append(part)
            place, left = place + len(part), left - len(part)
        return np.frombuffer(b"".join(parts) if len(parts) != 1 else parts[0], self.dtype)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in arrays of at most `BLOCK`."""
        for start in range(0, self.tokens, BLOCK):
            yield self.read(start, min(BLOCK, self.tokens - start))


def open_shard(path: str | Path) -> Shard:
    """Opens a shard. Raises the errors of `read_header`."""
    width, tokens, _ = read_header(Path(path))
    return Shard(path, np.dtype("<u2" if width == 2 else "<u4"), tokens, HEADER.size)


def verify_shard(path: str | Path, sha256: str | None = None) -> None:
    """Raises `ValueError` if a shard's tokens do not match the checksum in its header, or `sha256` (hex)."""
    written = read_header(Path(path))[-1]
    digest = hashlib.sha256()
    for block in open_shard(path).blocks():
        digest.update(block)
    if digest.hexdigest() != written or written != (sha256 or written):
        raise ValueError(f"{path} does not match its checksum: prepare the data again")


def read_manifest(data_dir: str | Path) -> dict:
    """Returns the manifest of a data folder, as in the module's docstring.

    Raises `FileNotFoundError` if there is none, `ValueError` if it is damaged or of another format.
    """
    path = Path(data_dir) / MANIFEST
    if not path.is_file():
        if manifest := third_party_manifest(data_dir):
            return manifest
        raise FileNotFoundError(
            f"{path} is missing: prepare the data first, as in "
            f"{recipe_command('prepare_data')} text FILE_OR_FOLDER --data_dir {data_dir}"
        )
    try:
        manifest = parse_json(path.read_text(encoding="utf-8"))
        found = (manifest["format"], manifest["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a readable manifest: prepare the data again") from error
    if found not in [(MANIFEST_FORMAT, VERSION), (MANIFEST_FORMAT, PACKED_VERSION)]:
        raise ValueError(
            f"{path} is {found[0]!r} version {found[1]}, this release reads "
            f"{MANIFEST_FORMAT!r} versions {VERSION} and {PACKED_VERSION}: prepare the data again"
        )
    if corruption := manifest_corruption(manifest):
        raise ValueError(f"{path} {corruption}: prepare the data again")
    return manifest


def manifest_corruption(manifest: dict) -> str | None:
    """Returns a message about the first missing or invalid entry of a manifest, None if it is valid."""
    try:
        vocab_size = manifest["tokenizer"]["vocab_size"]
        manifest["tokenizer"]["fingerprint"], manifest["source"]
        splits = manifest["splits"].items()
        counts, packed = [vocab_size], "sequence_length" in manifest
        if packed:
            counts.append(manifest["sequence_length"])
            bytes.fromhex(manifest["template"])
            if manifest["sequence_length"] == 0:
                return "has windows of 0 tokens"
        for name, entry in splits:
            counts.append(entry["tokens"])
            # Other trainers' files do not say, nor do conversations.
            counts += [entry[n] for n in ("bytes", "documents") if entry[n] is not None]
            if (
                packed
                and entry["targets"]["tokens"] * manifest["sequence_length"] != entry["tokens"]
            ):
                return f"has other windows in the split {name!r} than its tokens make"
            counts += [shard["tokens"] for shard in entry["shards"]]
            for shard in entry["shards"]:
                if Path(shard["file"]).name != shard["file"]:
                    return f"names a shard outside its folder, {shard['file']!r}"
                bytes.fromhex(shard["sha256"])
            if not entry["shards"] and "mixture" in manifest:
                continue
            if sum(shard["tokens"] for shard in entry["shards"]) != entry["tokens"]:
                return f"has a token count for the split {name!r} that is not the sum of its shards"
        for part in manifest.get("mixture", []):
            if not (isinstance(part["data_dir"], str) and 0 < float(part["weight"]) < math.inf):
                return f"has the impossible part {part!r}"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"is damaged ({type(error).__name__}: {error})"
    wrong = [count for count in counts if type(count) is not int or count < 0]
    return f"has the impossible count {wrong[0]!r}" if wrong else None


def data_fingerprint(data_dir: str | Path) -> str:
    """Returns the SHA-256 (hex) of a data folder's tokenizer, splits and checksums of all shards."""
    manifest = read_manifest(data_dir)
    content = [manifest["tokenizer"], manifest["dtype"], manifest["splits"]]
    for part, weight in mixture_parts(data_dir):
        content += [weight, data_fingerprint(part)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_data_tokenizer(data_dir: str | Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of prepared data: the one in its folder, else GPT-2's, for other trainers' data.

    Raises `FileNotFoundError` if it is missing, `ValueError` if it is not the one that made the tokens.
    """
    manifest, folder = read_manifest(data_dir), Path(data_dir) / "tokenizer"
    tokenizer = load_tokenizer(folder) if folder.is_dir() else gpt2_tokenizer()
    same = fingerprint(tokenizer) == manifest["tokenizer"]["fingerprint"]
    if not same or manifest.get("template") not in (None, template_digest(tokenizer)):
        raise ValueError(
            f"{folder} is not the tokenizer that made the tokens of {data_dir}, by the manifest: restore that "
            "tokenizer, or prepare the data again"
        )
    return tokenizer


def template_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the SHA-256 (hex) of a tokenizer's chat template."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def check_tokenizer(
    data_dir: str | Path, tokenizer: "PreTrainedTokenizerBase", model: str | Path
) -> None:
    """Raises `ValueError` if the data was made with another tokenizer than `tokenizer`, which is that of `model`."""
    if fingerprint(tokenizer) != read_manifest(data_dir)["tokenizer"]["fingerprint"]:
        raise ValueError(
            f"{data_dir} was tokenized with another tokenizer than {model} has: prepare the text with the "
            "model's tokenizer, in another --data_dir"
        )


def verify_data(data_dir: str | Path) -> int:
    """Checks the checksums of all shards, several at a time, and the tokenizer; returns the number of shards.

    Other trainers' files have no checksums, only their sizes are checked. Raises `ValueError` for the first shard that
    has changed, or if the tokenizer has changed.
    """
    data_dir = Path(data_dir)
    manifest = read_manifest(data_dir)
    if (data_dir / MANIFEST).is_file():
        load_data_tokenizer(data_dir)
    splits = manifest["splits"].values()
    shards = [shard for split in splits for shard in split["shards"]]
    shards += [split["targets"] for split in splits if "targets" in split]

    def verify(shard: dict) -> None:
        if shard["sha256"] is not None:
            verify_shard(data_dir / shard["file"], shard["sha256"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(progress(pool.map(verify, shards), "verifying", len(shards)))
    return len(shards) + sum(verify_data(part) for part, _ in mixture_parts(data_dir))


def mixture_parts(data_dir: str | Path) -> list[tuple[Path, float]]:
    """Returns a mixture's folders with their shares, which add up to 1; an empty list for other folders.

    Raises `ValueError` if one of them is a mixture, or if its tokenizer has changed since the mixture was made.
    """
    manifest = read_manifest(data_dir)
    parts = manifest.get("mixture", [])
    total = sum(part["weight"] for part in parts)
    folders = [Path(data_dir) / part["data_dir"] for part in parts]
    for folder in folders:
        found = read_manifest(folder)
        if "mixture" in found:
            raise ValueError(
                f"{data_dir} is a mixture of the mixture {folder}: prepare it again from the folders in that"
            )
        if found["tokenizer"]["fingerprint"] != manifest["tokenizer"]["fingerprint"]:
            raise ValueError(
                f"{folder} has another tokenizer than the mixture {data_dir}: prepare it again with that one"
            )
    return [(folder, part["weight"] / total) for folder, part in zip(folders, parts, strict=True)]


def conversation_length(data_dir: str | Path) -> int | None:
    """Returns the length in tokens of the windows of conversations in a data folder or mixture, None if it has none."""
    folders = [Path(data_dir), *(folder for folder, _ in mixture_parts(data_dir))]
    lengths = (read_manifest(folder).get("sequence_length") for folder in folders)
    return next(filter(None, lengths), None)


def write_mixture(data_dir: str | Path, weights: Mapping[str, float]) -> dict:
    """Writes a folder that is a mixture of the given folders; `weights` maps folders to weights. Returns its manifest.

    Each folder's share of the training sequences is its share of the weights, whatever its size: a small folder is
    repeated. Raises `ValueError` if a weight is below a thousandth of the total, a folder is named twice or is a
    mixture, or the tokenizers differ; `FileExistsError` if `data_dir` exists.
    """
    total = sum(weights.values())
    for folder, weight in weights.items():
        if not 0 < total / 1000 <= weight < math.inf:
            raise ValueError(
                f"the weight of {folder} must be at least a thousandth of the total, got {weight:g}"
            )
    if len({Path(folder).resolve() for folder in (data_dir, *weights)}) <= len(weights):
        raise ValueError(
            f"the folders of a mixture must differ from each other and from {data_dir}: name each once"
        )
    manifests = {folder: read_manifest(folder) for folder in weights}
    first, *others = manifests.values()
    for folder, manifest in manifests.items():
        if "mixture" in manifest:
            raise ValueError(f"{folder} is a mixture itself: name the folders in it instead")
        if manifest["tokenizer"]["fingerprint"] != first["tokenizer"]["fingerprint"]:
            raise ValueError(
                f"{folder} has another tokenizer than {next(iter(weights))}: prepare both with the same"
            )
    names = [split for split in first["splits"] if all(split in m["splits"] for m in others)]
    packed = [folder for folder, manifest in manifests.items() if "sequence_length" in manifest]
    for folder in packed[1:]:
        for name in ("sequence_length", "template"):
            if manifests[folder][name] != manifests[packed[0]][name]:
                raise ValueError(
                    f"{folder} has another {name} than {packed[0]}: prepare its conversations again with that one"
                )
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": PACKED_VERSION if packed else VERSION,
        "tokenizer": first["tokenizer"],
        "dtype": first["dtype"],
        "source": " + ".join(f"{weight:g} x {folder}" for folder, weight in weights.items()),
        "mixture": [
            {"data_dir": os.path.relpath(folder, data_dir), "weight": weight}
            for folder, weight in weights.items()
        ],
        "splits": {split: total_of(split, list(manifests.values())) for split in names},
    }
    with atomic_directory(data_dir) as folder:
        tokenizer = Path([*packed, *weights][0]) / "tokenizer"  # with the chat template
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, folder / "tokenizer")
        write_json(folder / MANIFEST, manifest)
    return manifest


def total_of(split: str, manifests: list[dict]) -> dict:
    """Returns the manifest's entry of a split over several folders, without shards."""
    total = {}
    for name in ("tokens", "documents", "bytes"):
        counts = [manifest["splits"][split][name] for manifest in manifests]
        total[name] = None if None in counts else sum(counts)
    return {**total, "shards": []}


def check_shards(data_dir: Path, shards: list[dict], width: int) -> None:
    """Checks each shard's size and header against the manifest.

    Raises `FileNotFoundError` if a shard is missing, `ValueError` if its size or checksum differs.
    """

    def check(shard: dict) -> None:
        path = data_dir / shard["file"]
        expected = shard.get("offset", HEADER.size) + shard["tokens"] * width
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} is missing, but the manifest lists it: prepare the data again"
            ) from None
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, the manifest says {expected}: prepare the data again"
            )
        if "offset" not in shard and read_header(path)[-1] != shard["sha256"]:
            raise ValueError(
                f"{path} holds other tokens than the manifest lists, by the checksum in its header: "
                "prepare the data again"
            )

    with ThreadPoolExecutor(16) as pool:  # a network disk has a high latency
        list(pool.map(check, shards))


class TokenStream:
    """One split of a data folder as one long array of tokens, across its shards.

    `shard(number)` returns one shard, opened at the first call; at most `OPEN_SHARDS` stay open. `tokens` is the
    length, `bytes` the UTF-8 bytes of the text (None if unknown), `vocab_size` the tokenizer's. `sequence_length` is the
    length of the windows of conversations, and `targets`, (windows,) int64, their counted tokens; both are None for text.

    Raises `ValueError` if the split does not exist or a shard's size or checksum is not the manifest's,
    `FileNotFoundError` if a shard is missing.
    """

    def __init__(self, data_dir: str | Path, split: str):
        manifest = read_manifest(data_dir)
        if split not in manifest["splits"]:
            raise ValueError(
                f"{data_dir} has no split {split!r}, only {', '.join(manifest['splits'])}"
            )
        entry = manifest["splits"][split]
        self.data_dir, self.split = Path(data_dir), split
        self.tokens: int = entry["tokens"]
        self.bytes: int | None = entry["bytes"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.shards: list[dict] = entry["shards"]
        self.sequence_length: int | None = manifest.get("sequence_length")
        self.targets: np.ndarray | None = None
        self._dtype = token_dtype(self.vocab_size if self.sequence_length is None else 2**32)
        if self.sequence_length is not None:
            check_shards(self.data_dir, [entry["targets"]], 4)
            counts = open_shard(self.data_dir / entry["targets"]["file"])
            self.targets = counts.read(0, len(counts)).astype(np.int64)
        check_shards(self.data_dir, self.shards, self._dtype.itemsize)
        self._ends = np.cumsum([shard["tokens"] for shard in self.shards], dtype=np.int64)
        self.shard = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open_shard)

    def _open_shard(self, number: int) -> Shard:
        shard = self.shards[number]
        path = self.data_dir / shard["file"]
        if "offset" in shard:
            return Shard(path, self._dtype, shard["tokens"], shard["offset"])
        check_shards(self.data_dir, [shard], self._dtype.itemsize)  # it may have been replaced
        return open_shard(path)

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns tokens [start, start + count) as (count,) int64; those of conversations with their bits.

        Raises `UnreadableData` if a shard no longer has them, `ValueError` if a token id is not below `vocab_size`.
        """
        assert 0 <= start and start + count <= self.tokens, (start, count, self.tokens)
        out = np.empty(count, np.int64)
        number = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < count:
            shard = self.shard(number)
            offset = start + filled - (int(self._ends[number]) - len(shard))
            piece = shard.read(offset, min(count - filled, len(shard) - offset))
            out[filled : filled + len(piece)] = piece
            ids = piece if self.sequence_length is None else piece & TOKEN_ID
            if len(ids) and ids.max() >= self.vocab_size:
                raise ValueError(
                    f"{shard.path} holds the token id {ids.max()}, but the vocabulary has "
                    f"{self.vocab_size}: prepare the data again"
                )
            filled += len(piece)
            number += 1
        return out
