"""Text -> token shards.

A document is a string. Documents come from text files (`text_files`, `read_text`) or a `datasets` data
set (`dataset_texts`); they are tokenized in batches and written split by split in the format of
`shards.py`. The folder appears when it is complete, not before.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from gpt2_accel.data.shards import (
    MANIFEST,
    MANIFEST_FORMAT,
    VERSION,
    ShardWriter,
    token_dtype,
)
from gpt2_accel.files import atomic_directory, write_json
from gpt2_accel.tokenizer import END_OF_TEXT, encode, fingerprint

BATCH_DOCUMENTS = 256  # tokenized at once, on all cores


def text_files(source: str | Path, pattern: str = "*.txt") -> list[Path]:
    """The file `source`, or all files below the folder `source` that match `pattern`, sorted.

    Raises `FileNotFoundError` if it does not exist or holds no such file.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"{source} does not exist: give a text file or a folder of them")
    files = sorted(path for path in source.rglob(pattern) if path.is_file())
    if not files:
        raise FileNotFoundError(f"{source} holds no file that matches {pattern}")
    return files


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file. Raises `FileNotFoundError` if there is none, `ValueError` if it is empty
    or not UTF-8."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: give a text file")
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it to UTF-8") from error
    if not text:
        raise ValueError(f"{path} is empty: there is nothing to train on")
    return text


def dataset_texts(name: str, column: str = "text", **options) -> Iterator[str]:
    """The documents of a `datasets` data set, streamed.

    `name` and `options` (`name` of a configuration, `split`, `data_files`, …) go to
    `datasets.load_dataset`. Raises `ValueError` if it has no column `column`.
    """
    from datasets import load_dataset

    for row in load_dataset(name, streaming=True, **{"split": "train", **options}):
        if column not in row:
            raise ValueError(
                f"the data set {name} has no column {column!r}: choose one of {', '.join(row)}"
            )
        yield row[column]


def held_out(key: str, one_in: int = 20) -> bool:
    """Whether the document named `key` is for validation: one in `one_in`, by SHA-256 of its name.

    So a document stays on its side when others are added or removed.
    """
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % one_in == 0


def prepare(
    splits: Mapping[str, Iterable[str]],
    tokenizer: PreTrainedTokenizerBase,
    data_dir: str | Path,
    *,
    source: str,
    shard_tokens: int = 100_000_000,
) -> dict:
    """Tokenizes the documents of each split into `data_dir` and returns the manifest.

    `source` says in the manifest what the text was. A shard ends with the batch of documents in which
    it reaches `shard_tokens`.

    Raises `FileExistsError` if `data_dir` is there already, `ValueError` if a split holds no text. In
    either case, and when it is interrupted, nothing is left behind.
    """
    eot = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": VERSION,
        "tokenizer": {
            "vocab_size": len(tokenizer),
            "fingerprint": fingerprint(tokenizer),
            "end_of_text": eot,
        },
        "dtype": token_dtype(len(tokenizer)).name,
        "source": source,
        "splits": {},
    }
    with atomic_directory(data_dir) as folder:
        tokenizer.save_pretrained(folder / "tokenizer")
        for split, documents in splits.items():
            entry = write_split(folder, split, documents, tokenizer, shard_tokens)
            if not entry["bytes"]:
                raise ValueError(f"{source} holds no text for the split {split!r}: add documents")
            manifest["splits"][split] = entry
        write_json(folder / MANIFEST, manifest)
    return manifest


def write_split(
    folder: Path,
    split: str,
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    shard_tokens: int,
) -> dict:
    """Writes the shards of one split; returns its entry in the manifest."""
    entry = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
    dtype = token_dtype(len(tokenizer))
    batches = encoded_batches(documents, tokenizer)
    with tqdm(unit="tokens", unit_scale=True, desc=f"tokenizing {split}", disable=None) as bar:
        for number in itertools.count():
            batch = next(batches, None)
            if batch is None:
                return entry
            writer = ShardWriter(folder / f"{split}_{number:06d}.bin", dtype)
            while batch is not None:
                tokens, texts = batch
                writer.append(tokens)
                bar.update(len(tokens))
                entry["documents"] += len(texts)
                entry["bytes"] += sum(len(text.encode()) for text in texts)
                batch = next(batches, None) if writer.tokens < shard_tokens else None
            entry["shards"].append(writer.close())
            entry["tokens"] += writer.tokens


def encoded_batches(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Documents by the batch, as (tokens of all, each document after its separator; their texts)."""
    eot = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    separator = [] if eot is None else [eot]
    documents = iter(documents)
    while texts := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        ids = [separator + document for document in encode(tokenizer, texts)]
        yield np.concatenate([np.asarray(document, np.int64) for document in ids]), texts
