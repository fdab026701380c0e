"""Tokenizes text into shards: from Python, or from the parts of a source (`sources.py`) by several processes (`workers.py`)."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.data.documents import Document
from gpt2_accel.data.shards import (
    MANIFEST,
    VERSION,
    ShardWriter,
    read_manifest,
    read_shard,
    token_dtype,
)
from gpt2_accel.data.sources import (
    Source,
    Texts,
    clean,
    split_text,
    text_source,
    tiny_shakespeare,
)
from gpt2_accel.data.workers import run_parts
from gpt2_accel.tokenizer import END_OF_TEXT, bytes_per_token, token_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_TOKENS = 100_000_000


def prepare(
    splits: Mapping[str, Iterable[str]],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    source: str,
) -> dict:
    """Tokenizes the given documents of each split into `data_dir`, one shard per split; returns the manifest.

    `source` is the manifest's description of the text. Raises the errors of `run_parts`. An error or an interrupt
    leaves no files.
    """
    print(f"tokenizing {source}", file=sys.stderr)
    writer = TextWriter(tokenizer, source, tuple(splits))
    return run_parts([Texts(splits)], writer, tokenizer, data_dir, source=source)


def prepare_text(
    path: str | Path | None,
    data_dir: str | Path,
    tokenizer_of: Callable[[str], "PreTrainedTokenizerBase"],
) -> None:
    """Prepares the text of `path`, by default tiny Shakespeare, unless `data_dir` holds it already.

    `tokenizer_of` maps the text to its tokenizer. Raises `ValueError` if `data_dir` was made from another text than
    that of `path`, and the errors of `tiny_shakespeare`.
    """
    prepared = (Path(data_dir) / MANIFEST).exists()
    if prepared and path is None:
        return
    text = tiny_shakespeare(path)
    source = text_source(text, path)
    if not prepared:
        prepare(split_text(text), tokenizer_of(text), data_dir, source=source)
    elif read_manifest(data_dir)["source"].split()[-1] != source.split()[-1]:  # SHA-256
        raise ValueError(
            f"{data_dir} was made from another text than {path}: choose another --data_dir"
        )


class TextWriter:
    """Tokenizes documents: each is preceded by `<|endoftext|>`, if the tokenizer has it.

    `source` names the corpus in errors. `splits` must not be empty. With `validation_tokens` the first tokens of the
    corpus are for validation, and all others for training.

    `counts` in the manifest has the documents without text, which are left out (`empty`), the bytes that are not UTF-8,
    replaced by U+FFFD (`not_utf8`), and the literals `<|endoftext|>`, encoded as text (`literal_separator`).
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        source: str,
        splits: tuple[str, ...] = ("train", "val"),
        validation_tokens: int = 0,
    ):
        self.source, self.splits, self.validation_tokens = source, splits, validation_tokens
        self.encode, self.dtype = token_encoder(tokenizer), token_dtype(len(tokenizer))
        self.token_bytes = bytes_per_token(tokenizer)
        self.separator = tokenizer.convert_tokens_to_ids(END_OF_TEXT)

    def write(self, folder: Path, number: int, part: Source) -> dict:
        """Tokenizes a part into one shard per split; returns its record.

        Raises `ValueError` for a character that is not in the vocabulary.
        """
        shards: dict[str, ShardWriter] = {}
        found: dict[str, Counter] = {}
        counts, first_not_utf8 = Counter(empty=0, not_utf8=0, literal_separator=0), None
        for document in part.documents():
            split, invalid = document.split, counts["not_utf8"]
            if split not in shards:
                path = folder / f"{split}_{number:06d}.bin"
                shards[split], found[split] = ShardWriter(path, self.dtype), Counter()
            size = self.append(document, shards[split], counts)
            found[split]["bytes"] += size
            found[split]["documents"] += document.begins and size > 0
            if counts["not_utf8"] > invalid:
                first_not_utf8 = first_not_utf8 or str(document.place)
        splits = {split: self.close(shards[split], **found[split]) for split in shards}
        return {"counts": counts, "first_not_utf8": first_not_utf8, "splits": splits}

    def append(self, document: Document, shard: ShardWriter, counts: Counter) -> int:
        """Appends a document's tokens to a shard and updates `counts`; returns the bytes of its text."""
        size = 0
        for chunk in document.chunks:
            text, invalid = clean(chunk)
            try:
                tokens = self.encode(text)
            except ValueError as error:
                raise ValueError(f"{document.place}: {error}") from error
            if document.begins and not size and self.separator is not None:
                shard.append(np.array([self.separator]))
            shard.append(tokens)
            size += len(text) if text.isascii() else len(text.encode())
            counts["not_utf8"] += invalid
            counts["literal_separator"] += text.count(END_OF_TEXT)
        counts["empty"] += not size
        return size

    def close(self, shard: ShardWriter, documents: int, bytes: int) -> dict:
        """Closes a shard; returns the manifest's entry of a split with this shard only.

        The shard's own `documents` are its separators.
        """
        entry = {**shard.close(), "documents": 0 if self.separator is None else documents}
        counts = {"tokens": shard.tokens, "documents": documents, "bytes": bytes}
        return {**counts, "shards": [entry]}

    def assemble(self, folder: Path, records: list[dict]) -> dict:
        """Adds up the records. Raises `ValueError` if a split would be empty."""
        counts = Counter()
        for record in records:
            counts.update(record["counts"])
        entries = [record["splits"] for record in records]
        names = dict.fromkeys(name for entry in entries for name in entry)
        splits = {name: total([e[name] for e in entries if name in e]) for name in names}
        if self.validation_tokens and "train" in splits:
            splits = self.hold_out_first(folder, splits["train"])
        for split in self.splits:
            if not splits.get(split, {}).get("tokens"):
                shorter = ", or lower --shard_tokens" if self.validation_tokens else ""
                raise ValueError(
                    f"{self.source} holds no text for the split {split!r}: add documents{shorter}"
                )
        return {
            "version": VERSION,
            "dtype": self.dtype.name,
            "counts": counts,
            "first_not_utf8": next(filter(None, (r["first_not_utf8"] for r in records)), None),
            "splits": splits,
        }

    def hold_out_first(self, folder: Path, train: dict) -> dict[str, dict]:
        """Moves the first `validation_tokens` of the training split into a shard for validation; returns both splits.

        Their shards stay until the manifest is written, so this can be done again after a kill.
        """
        shards, tokens = list(train["shards"]), np.empty(0, self.dtype)
        while shards and len(tokens) < self.validation_tokens:
            shard = shards.pop(0)
            own = read_shard(folder, self.dtype, shard, 0, shard["tokens"])
            tokens = np.concatenate((tokens, own))
        first, rest = np.split(tokens, [self.validation_tokens])
        val = self.store(folder / "val_000000.bin", first)
        if len(rest):
            shards[:0] = self.store(folder / "train_rest.bin", rest)["shards"]
        others = {
            "tokens": sum(shard["tokens"] for shard in shards),
            "documents": sum(shard["documents"] for shard in shards),
            "bytes": train["bytes"] - val["bytes"],
            "shards": shards,
        }
        return {"val": val, "train": others}

    def store(self, path: Path, tokens: np.ndarray) -> dict:
        """Writes a shard; returns as `close`."""
        shard = ShardWriter(path, self.dtype)
        shard.append(tokens)
        documents = int(np.count_nonzero(tokens == self.separator))
        return self.close(shard, documents, int(self.token_bytes[tokens].sum()))


def total(entries: list[dict]) -> dict:
    """Adds up the manifest's entries of one split; their shards are joined in order."""
    found = {
        name: sum(entry[name] for entry in entries) for name in ("tokens", "documents", "bytes")
    }
    return {**found, "shards": [shard for entry in entries for shard in entry["shards"]]}
