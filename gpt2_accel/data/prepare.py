"""Tokenizes documents into the shards of a data folder, and restarts after a kill.

One pass reads the documents in order. Threads tokenize, since the tokenizers' libraries release
Python's lock, and the main thread writes. After about `shard_tokens` tokens, at the end of a
document, the open shards are closed and a record of the progress is written. The shards are in
`.NAME.partial` beside the data folder until all are complete. The same command continues after the
last record. If the source, the tokenizer or the options have changed, it starts again.
"""

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from gpt2_accel.data.documents import text_digest
from gpt2_accel.data.shards import (
    DATA_MANIFEST,
    MANIFEST_FORMAT,
    TOKEN_DTYPES,
    VERSION,
    ShardWriter,
    TokenStream,
    read_manifest,
)
from gpt2_accel.data.sources import (
    ChangedSource,
    Source,
    read_text,
    text_source,
    texts,
    tiny_shakespeare,
)
from gpt2_accel.data.threads import in_order
from gpt2_accel.runtime.files import (
    disk_errors,
    remove,
    remove_leftovers,
    sync,
    sync_tree,
    write_json,
)
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.tokenizer import (
    END_OF_TEXT,
    GPT2_FINGERPRINT,
    PROBE,
    PreTrainedTokenizerBase,
    describe_marks,
    document_marks,
    fingerprint,
    lost_characters,
    probe_ids,
    save_tokenizer,
    special_pattern,
    text_start,
    token_encoder,
)

SHARD_TOKENS = 100_000_000
GROUP = 2**18  # characters that a thread tokenizes at once, if chunks are shorter
RECORD = "record.json"


def prepare(
    splits: Mapping[str, Iterable[str]],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    source: str,
) -> dict:
    """Tokenizes the documents of each split into `data_dir`, one shard per split.

    If the folder holds the same texts, splits and tokens already, it is used again. All documents
    are read into memory. `source` describes the text, for the manifest. Returns the manifest.
    Raises `ValueError` for a character that is not in the vocabulary or an empty split, and
    `OSError` if the folder holds other data or cannot be used. An error or an interrupt leaves no
    files.
    """
    kept = {split: list(own) for split, own in splits.items()}
    digests = [(split, *map(text_digest, own)) for split, own in kept.items()]
    plan = plan_of(digests, tokenizer, probe_ids(tokenizer))
    found = [texts(source, kept, sum(map(len, chain(*kept.values()))))]
    return prepare_sources(found, tokenizer, data_dir, source=source, plan=plan, splits=[*kept])


def prepare_text(
    path: str | Path | None,
    data_dir: str | Path,
    tokenizer_of: Callable[[str], "PreTrainedTokenizerBase"],
) -> None:
    """Prepares the text of `path`, by default tiny Shakespeare, unless `data_dir` holds it already.

    Raises `ValueError` if `data_dir` was made from another text, and what `prepare_one` raises.
    """
    if not (Path(data_dir) / DATA_MANIFEST).exists():
        prepare_one(path, data_dir, tokenizer_of)
    elif path is not None and text_digest(read_text(path)) not in read_manifest(data_dir)["source"]:
        raise ValueError(
            f"{data_dir} was made from another text than {path}: choose another --data_dir"
        )


def prepare_one(
    path: str | Path | None,
    data_dir: str | Path,
    tokenizer_of: Callable[[str], "PreTrainedTokenizerBase"],
    command: str | None = None,
) -> dict:
    """Tokenizes the text of `path`, by default tiny Shakespeare, into `data_dir`.

    `tokenizer_of` maps the text to its tokenizer. Returns the manifest. Raises `ValueError` if the
    text is empty or not UTF-8, `OSError` if it cannot be read or the folder holds other data.
    """
    text = tiny_shakespeare() if path is None else read_text(path)
    name = f"{path or 'tiny Shakespeare'}, SHA-256 {text_digest(text)}"
    tokenizer = tokenizer_of(text)
    found = [text_source(text, name, tokenizer)]
    plan = plan_of(found, tokenizer)  # another start may finish first
    return prepare_sources(found, tokenizer, data_dir, source=name, plan=plan, command=command)


def prepare_sources(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    source: str,
    plan: str,
    splits: Sequence[str] = ("train", "val"),
    shard_tokens: float = math.inf,
    validation_tokens: int = 0,
    workers: int = 1,
    **about: str | None,
) -> dict:
    """Tokenizes all documents of `sources` into `data_dir`, in `workers` threads.

    The tokens of `document_marks` begin and end each document. `validation_tokens` holds out the
    first documents of the corpus, until they have that many tokens; all others are for training.

    `plan` and `about` as in `make_data`. Returns the manifest. Raises `ValueError` for a character
    that is not in the vocabulary and if one of `splits` would be empty, and `OSError` if the folder
    holds other data or is in use.
    """

    def write(folder: Path, record: dict) -> dict:
        writer = TextWriter(folder, record, tokenizer, splits, shard_tokens, validation_tokens)
        record = writer.record
        total = sum(source.size for source in sources)
        done = sum(entry["bytes"] for entry in record["splits"].values())
        bar = Progress(
            "tokenizing", total, disable=total <= 0, initial=done, unit="B", unit_scale=True
        )
        groups = read_groups(sources, tuple(record["next"]))
        with bar:
            for encoded in in_order(writer.encode, groups, workers, 2 * workers):
                for piece, tokens, size, unknown, special in encoded:
                    writer.append(piece, tokens, size)
                    record["unknown"] += unknown
                    record["special"] = Counter(record["special"]) + special
                    bar.update(size)
        writer.close_shards()
        for split, entry in record["splits"].items():
            if not entry["tokens"]:
                raise ValueError(
                    f"{source} holds no text for the split {split!r}: add other documents (equal "
                    "rows share a split, a few words are not divided); for fineweb-edu lower "
                    "--shard_tokens"
                )
        record["separation"] = describe_marks(tokenizer)
        return {"version": VERSION, "dtype": writer.dtype.name} | record

    begin, end = document_marks(tokenizer)
    # The plans of 0.6 are kept: their folders have no other documents.
    if END_OF_TEXT not in tokenizer.get_vocab() and (begin or tokenizer.unk_token):
        plan += f", {begin}, {end}"
    return make_data(write, tokenizer, data_dir, plan, source=source, **about)


# Reading and tokenizing


class Piece(NamedTuple):
    """A chunk of a document. `at` is (number of the source, of the document)."""

    at: tuple[int, int]
    begins: bool
    ends: bool
    split: str
    chunk: str
    place: str


def read_groups(sources: Sequence[Source], start: tuple[int, int]) -> Iterator[list[Piece]]:
    """Yields the chunks of all documents in lists of at least `GROUP` characters, the last shorter.

    `start` is the `Piece.at` of the first document.
    """
    group = []
    size = 0
    for number in range(start[0], len(sources)):
        for document, (split, chunks, place) in enumerate(sources[number].documents()):
            at = number, document
            if at < start:
                continue
            begins = True
            for chunk, following in pairwise(chain(chunks, [None])):  # None follows the last
                assert chunk is not None
                ends = following is None
                group.append(Piece(at, begins, ends, split, chunk, place))
                begins = False
                size += len(chunk)
                if size >= GROUP:
                    yield group
                    group = []
                    size = 0
    yield group


@dataclass
class TextWriter:
    """Tokenizes pieces of documents and appends them to the shards of a folder.

    `record` is the progress: `next`, the `Piece.at` where a restart continues; `unknown`, `special`
    and `splits` as in the manifest. It continues the given record.
    """

    folder: Path
    record: dict
    tokenizer: "PreTrainedTokenizerBase"
    splits: Sequence[str]
    shard_tokens: float
    validation_tokens: int

    def __post_init__(self) -> None:
        self.dtype = TOKEN_DTYPES["uint16" if len(self.tokenizer) <= 2**16 else "uint32"]
        self.tokenize = token_encoder(self.tokenizer)
        self.tokenize("")  # sets the options of a Hugging Face tokenizer, which the threads share
        probe = probe_ids(self.tokenizer) or []
        self.is_lossy = lost_characters(self.tokenizer, PROBE, probe) > 0
        self.special = special_pattern(self.tokenizer)
        marks = document_marks(self.tokenizer)
        self.begin, self.end = (np.array(mark, self.dtype) for mark in marks)
        entries = {}
        for split in self.splits:
            entries[split] = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
        new = {"next": (0, 0), "splits": entries, "unknown": 0, "special": {}}
        self.record = new | self.record
        self.shards: dict[str, ShardWriter] = {}  # those that are open

    def encode(self, group: list[Piece]) -> list[tuple[Piece, np.ndarray, int, int, Counter]]:
        """Returns (piece, tokens, bytes of its text, unknown characters, special tokens) for each
        piece.

        Halves of surrogate pairs become U+FFFD. An unknown token that is also a token between
        documents is left out.
        """
        encoded = []
        for piece in group:
            unknown = 0
            text = piece.chunk.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            try:
                tokens = self.tokenize(text)
            except ValueError as error:
                raise ValueError(f"{piece.place}: {error}") from error
            if self.is_lossy:
                unknown = lost_characters(self.tokenizer, text, tokens.tolist())
                tokens = tokens[~np.isin(tokens, (*self.begin, *self.end))]
            parts = self.begin[: piece.begins], tokens, self.end[: piece.ends]  # 0 or 1 token each
            tokens = np.concatenate(parts, dtype=self.dtype, casting="unsafe")
            special = Counter(self.special.findall(text))
            encoded.append((piece, tokens, len(text.encode()), unknown, special))
        return encoded

    def append(self, piece: Piece, tokens: np.ndarray, size: int) -> None:
        """Appends a piece's tokens, of `size` bytes of text, to the shard of its split."""
        if piece.begins:
            self.begin_document(piece)
        entry = self.record["splits"][self.split]
        if self.split not in self.shards:
            path = self.folder / f"{self.split}_{len(entry['shards']):06d}.bin"
            self.shards[self.split] = ShardWriter(path, self.dtype)
        shard = self.shards[self.split]
        shard.append(tokens)
        entry["tokens"] += len(tokens)
        entry["bytes"] += size
        if piece.begins:
            entry["documents"] += 1
            shard.documents += len(self.begin)  # the separators in the shard

    def begin_document(self, piece: Piece) -> None:
        """Closes the open shards if they are long enough, and chooses the document's split."""
        if sum(shard.tokens for shard in self.shards.values()) >= self.shard_tokens:
            self.close_shards()
            self.record["next"] = piece.at
            sync(self.folder)
            write_json(self.folder / RECORD, self.record)
        self.split = piece.split
        if self.validation_tokens:
            enough = self.record["splits"]["val"]["tokens"] >= self.validation_tokens
            self.split = "train" if enough else "val"

    def close_shards(self) -> None:
        """Closes the open shards."""
        for split, shard in self.shards.items():
            self.record["splits"][split]["shards"].append(shard.close())
        self.shards = {}


# The data folder


def make_data(
    write: Callable[[Path, dict], dict],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    plan: str,
    **about: str | None,
) -> dict:
    """Makes a data folder in the format of `shards.py`, unless `plan`'s folder is complete.

    `write(folder, record)` writes the shards into `folder`, and returns the manifest's version,
    dtype, splits and other entries. `record` is the progress of an earlier call with the same
    `plan`, or a new record. The manifest also gets `about`: `source`, `revision`, `command`.

    Returns the manifest. Raises `FileExistsError` if the folder holds other data, `OSError` if
    another process is preparing it, `ValueError` if a shard is damaged, and whatever `write`
    raises.
    """
    data_dir = Path(data_dir)
    path = data_dir.with_name(f".{data_dir.name}.lock")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise OSError(
            f"another process is preparing {data_dir}: wait until it ends, then start again"
        ) from error
    try:
        if not os.path.lexists(data_dir):
            write_folder(write, tokenizer, data_dir, plan, about)
        elif read_json(data_dir / DATA_MANIFEST).get("plan") != plan:
            raise FileExistsError(
                f"{data_dir} exists already, and not from the same files (their names, sizes, "
                "times) and settings: choose another folder"
            )
    finally:
        path.unlink(missing_ok=True)  # a process that has opened it tries again
        lock.release()
    (data_dir / RECORD).unlink(missing_ok=True)
    manifest = read_manifest(data_dir)
    for split in manifest["splits"]:
        TokenStream(data_dir, split)  # a finished folder may have lost a shard since
    return manifest


def write_folder(
    write: Callable[[Path, dict], dict],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: Path,
    plan: str,
    about: dict[str, Any],
) -> None:
    """Writes the new folder `data_dir`. A kill leaves the finished shards in `.NAME.partial`."""
    work = data_dir.with_name(f".{data_dir.name}.partial")
    record = open_work(work, plan)
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if fingerprint(tokenizer) == GPT2_FINGERPRINT:
        name = "gpt2"
    entry = tokenizer_entry(tokenizer, name, text_start(tokenizer))
    try:
        with disk_errors(work, data_dir):
            manifest = {"format": MANIFEST_FORMAT, "tokenizer": entry} | about
            manifest |= write(work, record) | {"plan": plan}
            save_tokenizer(tokenizer, work / "tokenizer", data_dir / "tokenizer")
            write_json(work / DATA_MANIFEST, manifest)
    except BaseException as error:
        if isinstance(error, ChangedSource) or not (work / RECORD).exists():
            remove(work)
        raise
    sync_tree(work)
    work.rename(data_dir)
    sync(data_dir.parent)


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


def plan_of(sources: Sequence[Any], tokenizer: "PreTrainedTokenizerBase", *options: Any) -> str:
    """Returns the SHA-256 (hex) of everything that a preparation depends on."""
    content = [repr(source) for source in sources]
    content.append(fingerprint(tokenizer))
    content += [repr(option) for option in options]
    return text_digest("\n".join(content))


def read_json(path: Path) -> dict:
    """Returns the content of a JSON file, empty if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def open_work(work: Path, plan: str) -> dict:
    """Returns the record of the work folder if it is of this plan; else empties the folder."""
    record = read_json(work / RECORD)
    if record and record["plan"] == plan:
        remove_leftovers(work)
        return record
    if record:
        print(
            f"the source, the tokenizer or the options have changed since the work in {work} "
            "began: it starts from the beginning",
            file=sys.stderr,
        )
    remove(work)
    work.mkdir()
    return {"plan": plan}
