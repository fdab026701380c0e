"""The data of a run: a tokenizer, and sources of windows for training and validation.

A **source** is any object with `__len__` (at most 2^62) and `__getitem__(i)`, which returns window
i as one of
- T + 1 token ids: each predicts the next;
- a pair `(input_ids, targets)` of T each; a target of -100 does not count. A third item,
  `documents`, (T,), numbers the text of each token: attention stays inside it;
- a dict with `input_ids` of T + 1; or with `input_ids` and `labels` of T, as in `transformers`:
  not shifted, so the last position has no target. A position whose `attention_mask` is 0 does not
  count. Rows of a `datasets.Dataset` have this form.

Item i is a function of i alone: the order of training is a function of seed and position, and so a
resume, the ranks and the micro-batches see the same windows. An endless generator is a source that
draws from `hash64(seed, i)`.

If windows differ in the number of targets that count, the source has a method `counts(i)`, which
returns that number without making the window: a rank needs it for the windows of all ranks. An
optional attribute `fingerprint`, a text, changes with the content.

`open_data` returns the data of a folder that `prepare_data.py` wrote.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_accel.data.documents import text_digest
from gpt2_accel.data.shards import (
    HEADER,
    TOKEN_DTYPES,
    TokenStream,
    listed_shards,
    read_manifest,
    read_parts,
    read_shard,
    template_digest,
)
from gpt2_accel.runtime.files import sentence
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.runtime.recipe_command import recipe_command
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, fingerprint, load_tokenizer

TRIED = 8  # windows of a source that are read twice before training
COLUMNS = {"input_ids", "labels", "attention_mask"}


@dataclass(eq=False)
class Data:
    """What a run trains on, made once.

    `train` and `val` are sources; `val` may be None. `name` is for messages, `description` for the
    model card. After construction they are lists of checked sources with their weights, which sum
    to 1. `fingerprint` identifies the tokenizer and the content.

    The rest describes prepared data: its `folder`; whether it holds conversations (`chat`), with
    several in a window (`packed`), or `pairs` of answers; the tokens that separate its documents;
    later weights of a mixture, with the share of the run from which on they hold (`phases`).

    Raises `ValueError` if a source does not return windows, returns another one when it is read
    again, or has token ids that the tokenizer does not have.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Any
    val: Any = None
    _: KW_ONLY
    name: str
    description: str = ""
    fingerprint: str = ""
    folder: Path | None = None
    chat: bool = False
    packed: bool = False
    pairs: bool = False
    separators: frozenset[int | None] = frozenset()
    phases: Sequence[tuple[float, list[float]]] = ()

    def __post_init__(self) -> None:
        if self.folder is not None:
            return
        if not hasattr(self.tokenizer, "backend_tokenizer") or self.train is None:
            raise ValueError(
                f"{self.name} has a tokenizer of the type {type(self.tokenizer).__name__} and a "
                f"source of the type {type(self.train).__name__}: give Data a fast tokenizer of "
                "transformers, then the source for training"
            )
        content = [fingerprint(self.tokenizer)]
        for split in ("train", "val"):
            source = getattr(self, split)
            if source is not None:
                rows = Rows(source, len(self.tokenizer), f"{self.name}, {split}")
                content.append(rows.fingerprint)
                setattr(self, split, [(rows, 1.0)])
        self.fingerprint = text_digest(repr(content))
        self.packed = self.train[0][0].documents
        self.description = self.description or self.name

    @property
    def sequence_length(self) -> int | None:
        """The length of the windows, None for text, which can be read in windows of any length."""
        return self.train[0][0].sequence_length

    @property
    def tokens(self) -> int:
        """The number of tokens for training."""
        return sum(source.tokens for source, _ in self.train)

    def split(self, name: str) -> list[tuple[Any, float]]:
        """Returns `train` or `val`. Raises `ValueError` if there is no validation split."""
        found = getattr(self, name)
        if found is None:
            fix = "give Data a val" if self.folder is None else "prepare it with one"
            raise ValueError(f"{self.name} has no split 'val': {fix}, or set --eval_every 0")
        return found

    def check_pairs(self, wanted: bool = False) -> None:
        """Raises `ValueError` unless the data holds pairs of answers exactly if they are
        `wanted`."""
        if self.pairs and not wanted:
            raise ValueError(
                f"{self.name} holds pairs of a better and a worse answer: train on them by "
                "chat_dpo.py, and take other data for this"
            )
        if wanted and not self.pairs:
            raise ValueError(
                f"{self.name} holds no pairs of answers: prepare some by "
                f"{recipe_command('prepare-data', 'chat')} FILE --pairs"
            )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: str | Path) -> None:
        """Raises `ValueError` if `tokenizer`, of `model`, is another one than the data's."""
        if fingerprint(tokenizer) != fingerprint(self.tokenizer):
            raise ValueError(
                f"{self.name} was tokenized with another tokenizer than {model} has: prepare the "
                "text with the model's tokenizer, in another --data_dir, or give it to Data"
            )


# Prepared data


def open_data(data_dir: str | Path) -> Data:
    """Opens prepared data: a folder or a mixture.

    Reads each manifest once, and checks the header of each shard. Raises `FileNotFoundError` if it
    is not prepared or its tokenizer is missing, `ValueError` if a file is damaged, if the tokenizer
    did not make the tokens, or if a part of a mixture has changed since it was mixed.
    """
    folder = Path(data_dir)
    manifest = read_manifest(data_dir)
    parts = read_parts(folder, manifest)
    tokenizer = load_tokenizer(folder / "tokenizer")
    same = fingerprint(tokenizer) == manifest["tokenizer"]["fingerprint"]
    if not same or manifest.get("template") not in (None, template_digest(tokenizer)):
        raise ValueError(
            f"{folder / 'tokenizer'} is not the tokenizer that made the tokens of {data_dir}, by "
            "the manifest: restore that tokenizer, or prepare the data again"
        )

    def streams(split: str) -> list[tuple[TokenStream, float]]:
        return [(TokenStream(part, split, own), weight) for part, own, weight in parts]

    chat = bool(manifest.get("sequence_length"))
    pairs = bool(manifest.get("pairs"))
    return Data(
        tokenizer,
        streams("train"),
        streams("val") if "val" in manifest["splits"] else None,
        name=str(data_dir),
        description=f"{manifest['source']} ({manifest['splits']['train']['tokens']:,} tokens)",
        fingerprint=data_fingerprint(manifest, parts),
        folder=folder,
        chat=chat,
        packed=not pairs and any(own.get("packed", chat) for _, own, _ in parts),
        pairs=pairs,
        phases=[
            (phase["from"], [weight / sum(phase["weights"]) for weight in phase["weights"]])
            for phase in manifest.get("phases", ())
        ],
        separators=frozenset(own["tokenizer"]["end_of_text"] for _, own, _ in parts),
    )


def data_fingerprint(manifest: Mapping, parts: Sequence[tuple[Path, Mapping, float]] = ()) -> str:
    """Returns the SHA-256 (hex) of the tokenizer, splits and shard checksums in a manifest.

    For a mixture also those of its `parts`, from `read_parts`.
    """
    content = [manifest["tokenizer"], manifest["dtype"], manifest["splits"]]
    if "mixture" in manifest:
        for _, part, weight in parts:
            content += [weight, data_fingerprint(part)]
        content += manifest.get("phases", ())
    return text_digest(json.dumps(content, sort_keys=True))


def verify_data(data_dir: str | Path) -> int:
    """Checks the checksums of all shards and the tokenizer; returns the number of shards.

    Raises `ValueError` if a shard or the tokenizer has changed.
    """
    open_data(data_dir)
    shards = []
    for folder, manifest, _ in read_parts(Path(data_dir), read_manifest(data_dir)):
        shards += [(folder, manifest["dtype"], shard) for shard in listed_shards(manifest)]
    for folder, kind, shard in Progress("verifying", len(shards), shards):
        read_shard(folder, TOKEN_DTYPES[kind], shard, 0, 0)
        path = folder / shard["file"]
        with open(path, "rb") as file:
            file.seek(HEADER.size)
            if file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                raise ValueError(
                    f"{path} does not match its checksum: remove the folder and prepare or pull "
                    "the data again"
                )
    return len(shards)


# Sources of the user


class Rows:
    """A source of the user's in the form that the loaders read.

    `documents`: windows number the texts of their tokens. Raises `ValueError` as `Data` does.
    """

    def __init__(self, source: Any, vocab_size: int, name: str):
        listed = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        if not listed or isinstance(source, Mapping | str):
            raise ValueError(
                f"{name} has the type {type(source).__name__}, not __len__ and __getitem__(i): "
                "give a list of windows or the dataset of a DataLoader, and make an endless "
                "generator a source whose item is a function of i"
            )
        self.source = source
        self.vocab_size = vocab_size
        self.name = name
        length = source.__len__()  # `len` raises for these
        if not (isinstance(length, int | np.integer) and 0 < length <= 2**62):
            raise ValueError(
                f"{name} has a __len__ that returns {length!r}: return an integer from 1 to 2^62"
            )
        self.windows = int(length)
        window = self.read(0)
        rows, self.sequence_length = window.shape
        self.documents = rows == 3
        self.tokens = self.windows * self.sequence_length
        # Targets that count in each window, if the source does not count them.
        self.usual = targets_of(window)
        self.listed: list[int] = []  # the same of a list
        if isinstance(source, list | tuple):
            self.listed = [
                targets_of(self.read(number))
                for number in Progress("counting targets", self.windows, range(self.windows))
            ]
        first = [self[number] for number in range(min(TRIED, self.windows))]
        digest = sha256(f"{self.windows}, {first[0].shape}".encode())
        for number, window in enumerate(first):
            digest.update(window.tobytes())
            if not np.array_equal(window, self[number]):
                raise ValueError(
                    f"{name}: window {number} is another when it is read again: item i has to be a "
                    "function of i, so draw random numbers by numpy.random.default_rng(i)"
                )
        self.fingerprint = str(getattr(source, "fingerprint", digest.hexdigest()))

    def __getitem__(self, number: int) -> np.ndarray:
        """Returns inputs, targets and documents of a window, (3, T) int64.

        Raises `ValueError` for another length, wrong token ids or another number of targets.
        """
        window = self.read(number)
        found = targets_of(window)
        problem = ""
        if window.shape != (2 + self.documents, self.sequence_length):
            problem = f"has the shape {window.shape}, the first had {self.sequence_length} tokens"
        elif (
            window[:2].max() >= self.vocab_size
            or window[0].min() < 0
            or window[1].min(where=window[1] != -100, initial=0) < 0
        ):
            problem = (
                f"has token ids that are not from 0 to {self.vocab_size - 1}, the tokenizer's, or "
                "targets that are neither these nor -100"
            )
        elif found != self.counts(number):
            problem = (
                f"has {found} targets that count, not {self.counts(number)}: give the source a "
                "method counts(i), or make it a list"
            )
        if problem:
            raise ValueError(f"{self.name}: window {number} {problem}")
        return window if self.documents else np.append(window, np.zeros_like(window[:1]), axis=0)

    def read(self, number: int) -> np.ndarray:
        """Returns a window as the source has it, see `window_of`."""
        try:
            return window_of(self.source[number])
        except Exception as error:  # of the user's code
            kind = type(error).__name__
            raise ValueError(f"{self.name}: window {number}: {kind}: {sentence(error)}") from error

    def counts(self, number: int) -> int:
        """Returns the number of targets that count in a window."""
        own = getattr(self.source, "counts", None)
        if own is not None:
            return int(own(number))
        return self.listed[number] if self.listed else self.usual


def targets_of(window: np.ndarray) -> int:
    """Returns the number of targets of a window that count."""
    return int((window[1] != -100).sum())


def window_of(item: Any) -> np.ndarray:
    """Returns inputs and targets, (2, T) int64, or with documents (3, T), of an item of a source.

    Raises `ValueError` for an item of another form.
    """
    if isinstance(item, Mapping):
        if not {"input_ids"} <= item.keys() <= COLUMNS:
            raise ValueError(
                f"the columns are {', '.join(map(str, item))}: give input_ids, and besides it only "
                "labels and attention_mask"
            )
        ids = np.asarray(item["input_ids"])
        labels = np.asarray(item.get("labels", ids))
        labels = np.where(np.asarray(item.get("attention_mask", 1)), labels, -100)[1:]
        item = (ids, np.append(labels, -100)) if "labels" in item else (ids[:-1], labels)
    parts = [np.asarray(part) for part in (item if isinstance(item, tuple) else (item,))]
    if len(parts) == 1 and parts[0].ndim:
        parts = [parts[0][:-1], parts[0][1:]]
    if len({part.shape for part in parts}) > 1 or parts[0].ndim != 1 or not len(parts[0]):
        shapes = [part.shape for part in parts]
        raise ValueError(f"the shapes of its parts are {shapes}: give one of (T,) for all")
    if len(parts) > 3 or any(part.dtype.kind not in "iu" for part in parts):
        raise ValueError("give integers: T + 1 token ids, or inputs, targets and documents")
    return np.stack(parts).astype(np.int64)
