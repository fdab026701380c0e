"""Conversations: messages become tokens in the chat template, and windows of whole conversations.

The tokens that the template marks as the assistant's count in the loss. Windows are packed by best fit over ordered
lengths (best-fit decreasing, Ding et al., 2024, arXiv:2404.10830) and padded; a conversation is never divided.
"""

import functools
import json
import os
import re
import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.data.documents import fitting_share, name_digest
from gpt2_accel.data.messages import EMPTY, Problem, read_messages
from gpt2_accel.data.prepare import SHARD_TOKENS
from gpt2_accel.data.rows import Row, Rows, row_parts
from gpt2_accel.data.shards import (
    COUNTS,
    PACKED_VERSION,
    STARTS,
    TOKEN_ID,
    ShardWriter,
    template_digest,
    token_dtype,
)
from gpt2_accel.data.sources import ROW_SUFFIXES, clean, counted, visible_files
from gpt2_accel.data.workers import plan_of, run_parts
from gpt2_accel.files import atomic_file, first_line
from gpt2_accel.progress import progress
from gpt2_accel.tokenizer import conversation_tokens, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".json", *ROW_SUFFIXES)
NO_ANSWER = "without a message of the assistant that counts, or with none before the cut"
REFUSED = "that the chat template or the tokenizer refuses"
# How a conversation is changed that is kept.
CHANGES = CUT, REPLACED = (
    "cut to the length of a window",
    "with bytes or characters that are not Unicode, replaced by U+FFFD",
)
SHORTEST = 64  # tokens of a window
HELD_OUT = 20  # one conversation in 20 is for validation
DTYPE = token_dtype(2**32)


def file_rows(source: Path) -> list[Rows]:
    """Divides a file, or the files below a folder that are not hidden, into parts of rows.

    Prints which files are of another kind. Raises `FileNotFoundError` if none ends in one of `SUFFIXES`.
    """
    found = [source] if source.is_file() else visible_files(source)
    files = [path for path in found if path.name.endswith(SUFFIXES)]
    if not files:
        raise FileNotFoundError(
            f"{source} holds no conversations: give a file that ends in {', '.join(SUFFIXES)}, or a folder of them"
        )
    if len(files) < len(found):
        others = counted([path.name for path in found if path not in files])
        print(f"{source}: left out {others}, of another kind", file=sys.stderr)
    return row_parts(list(map(str, files)), SHARD_TOKENS)


def prepare_conversations(
    rows: Sequence[Rows],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    sequence_length: int,
    source: str,
    model: str,
    cut: bool = False,
    shorten: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 1,
    **about: str | None,
) -> dict:
    """Writes the conversations in `rows` into `data_dir`, in windows of `sequence_length` tokens; returns the manifest.

    `tokenizer` has a chat template that marks the assistant's tokens, and a `pad_token`, as `hf/chat_template.py` makes it.
    A conversation that is longer than a window is left out; with `cut` its beginning is kept. With `shorten` the windows
    are as long as the longest conversation, in multiples of `SHORTEST`, and at most `sequence_length`. `source`, `model` (a
    directory relative to `data_dir`) and `about` are recorded. Raises `ValueError` for a row in none of the
    forms and if a split would be empty, and the errors of `run_parts`.
    """
    if Path(model).is_dir():
        model = os.path.relpath(model, data_dir)
    writer = ConversationWriter(
        tokenizer, sequence_length, cut, model, source, shard_tokens, shorten
    )
    template = template_digest(tokenizer)
    plan = plan_of(rows, tokenizer, template, sequence_length, cut, model, shard_tokens, shorten)
    about |= {"source": source, "plan": plan}
    return run_parts(rows, writer, tokenizer, data_dir, workers=workers, **about)


def mask_answers(counts: np.ndarray, answers: Sequence[bool]) -> None:
    """Sets `counts`, (n,) bool, to False where an answer that does not count is marked; the k-th run of True is the
    k-th answer. Raises `Problem` if a template marks an answer in several runs, or several answers in one."""
    runs = np.flatnonzero(np.diff(counts, prepend=False, append=False)).reshape(-1, 2)
    if len(runs) != len(answers):
        raise Problem(REFUSED, "the template does not mark each answer by itself")
    for (start, end), answer in zip(runs.tolist(), answers, strict=True):
        if not answer:
            counts[start:end] = False


@dataclass(frozen=True)
class ConversationWriter:
    """Tokenizes the conversations of parts, and packs those of all parts into windows: a `prepare.Writer`."""

    tokenizer: "PreTrainedTokenizerBase"
    sequence_length: int
    cut: bool
    model: str
    source: str
    shard_tokens: int
    shorten: bool = False

    @functools.cached_property
    def specials(self) -> re.Pattern:
        return re.compile("|".join(map(re.escape, special_tokens(self.tokenizer))))

    def write(self, folder: Path, number: int, part: Rows) -> dict:
        """Writes a part's conversations into one file, uint32 with `STARTS` and `COUNTS`; returns their record.

        Its `index` has for each the part, the byte in its file, the number of tokens and the hash of the messages;
        `counts` and `first` have the number and the first place of each reason to leave out or change a conversation.
        """
        counts, first, index = Counter(), {}, []
        with atomic_file(tokens_path(folder, number)) as file:
            for row in part.rows():
                detail = ""
                try:
                    tokens, key, reasons = self.encode(row)
                    index.append((number, file.tell(), len(tokens), key))
                    file.write(tokens.tobytes())
                except Problem as problem:
                    reasons, detail = problem.args[:1], "".join(f" ({d})" for d in problem.args[1:])
                for reason in reasons:
                    counts[reason] += 1
                    if reason not in first:
                        first[reason] = f"{row.place}{detail}"  # may read the file
        return {"index": index, "counts": counts, "first": first}

    def encode(self, row: Row) -> tuple[np.ndarray, int, list[str]]:
        """Returns the tokens of a row with their bits, (n,) uint32, the hash of its messages, and which of `CHANGES` it has.

        Raises `Problem`, and the errors of `read_messages`.
        """
        messages, counted = read_messages(row.value, row.place)
        replaced = 0
        for message in messages:
            message["content"], wrong = clean(message["content"])
            replaced += wrong
        answers = [c for c, m in zip(counted, messages, strict=True) if m["role"] == "assistant"]
        if not messages:
            raise Problem(EMPTY)
        if not any(answers):
            raise Problem(NO_ANSWER)
        if any(self.specials.search(message["content"]) for message in messages):
            raise Problem(
                "with a special token of the tokenizer in a message, which would end a turn"
            )
        try:
            ids, counts = conversation_tokens(self.tokenizer, messages)
        except Exception as error:  # of the template's author, or of the tokenizer
            raise Problem(REFUSED, first_line(error)) from error
        if not all(answers):
            mask_answers(counts, answers)
        too_long = len(ids) > self.sequence_length
        if too_long and not self.cut:
            raise Problem("of more tokens than a window, whose beginning --cut keeps")
        tokens = ids[: self.sequence_length].astype(DTYPE)
        tokens[counts[: len(tokens)]] |= COUNTS
        tokens[0] = tokens[0] & TOKEN_ID | STARTS  # nothing comes before it
        if not (tokens & COUNTS).any():
            raise Problem(NO_ANSWER)
        key = int(name_digest(json.dumps(messages, sort_keys=True))[:16], 16)
        return tokens, key, [CUT] * too_long + [REPLACED] * bool(replaced)

    def assemble(self, folder: Path, records: list[dict]) -> dict:
        """Packs the conversations of all parts into shards; returns the manifest's entries.

        Raises `ValueError` if a split would be empty.
        """
        counts, first = Counter(), {}
        for record in records:
            counts.update(record["counts"])
            first = record["first"] | first
        index = [place for record in records for place in record["index"]]
        places = np.array(index, np.uint64).reshape(-1, 4)
        is_held_out = held_out(places[:, 3])
        splits = {"train": places[~is_held_out], "val": places[is_held_out]}
        for split, chosen in splits.items():
            if not len(chosen):
                lines = "".join(f"; {line}" for line in left_out(counts, first))
                raise ValueError(
                    f"{self.source} holds no conversation for the split {split!r}, and each split needs one{lines}: add "
                    "different conversations, or correct those that are left out"
                )
        size = self.sequence_length
        if self.shorten:
            longest = int(places[:, 2].max())
            size = min(size, -(-longest // SHORTEST) * SHORTEST)
        return {
            "version": PACKED_VERSION,
            "dtype": DTYPE.name,
            "sequence_length": size,
            "template": template_digest(self.tokenizer),
            "model": self.model,
            "counts": counts,
            "first": first,
            "splits": {
                name: self.pack(folder, name, chosen, size) for name, chosen in splits.items()
            },
        }

    def pack(self, folder: Path, split: str, places: np.ndarray, size: int) -> dict:
        """Writes the shards of a split, in windows of `size` tokens, and the counted targets of these; returns its entry in
        the manifest.

        `places`, (conversations, 4) uint64, are rows of the records' `index`.
        """
        windows = best_fit(places[:, 2].astype(np.int64), size)
        each = max(1, self.shard_tokens // size)
        shards, targets = [], []
        for begin in range(0, len(windows), each):
            name, group = f"{split}_{begin // each:06d}.bin", windows[begin : begin + each]
            writer = ShardWriter(folder / name, DTYPE, PACKED_VERSION)
            for window in progress(group, f"packing {name}", len(group)):
                tokens, end = np.full(size, self.tokenizer.pad_token_id, DTYPE), 0
                for part, offset, length, _ in places[window].tolist():
                    stored = np.fromfile(tokens_path(folder, part), DTYPE, length, offset=offset)
                    tokens[end : end + length] = stored
                    end += length
                writer.append(tokens)
                targets.append(np.count_nonzero(tokens & COUNTS))
            shards.append({**writer.close(), "documents": sum(map(len, group))})
        writer = ShardWriter(folder / f"{split}_targets.bin", DTYPE)
        writer.append(np.array(targets))
        tokens = len(windows) * size
        return {
            "tokens": tokens,
            "documents": len(places),
            "bytes": None,
            "counted": int(sum(targets)),
            "padding": tokens - int(places[:, 2].sum()),
            "targets": writer.close(),
            "shards": shards,
        }


def tokens_path(folder: Path, part: int) -> Path:
    """Returns the path of the tokens of a part."""
    return folder / f"{part:06d}.tokens"


def held_out(keys: np.ndarray) -> np.ndarray:
    """Returns which conversations are for validation, (n,) bool, by the hashes of their messages, (n,) uint64.

    It is one in `HELD_OUT` of the different conversations. If these are no `fitting_share` of them,
    it is the 20th part with the lowest hashes, at least one.
    """
    keys, inverse = np.unique(keys, return_inverse=True)
    chosen = keys % np.uint64(HELD_OUT) == 0
    if not fitting_share(chosen.sum() / max(1, len(keys))):
        chosen = np.arange(len(keys)) < max(1, round(len(keys) / HELD_OUT))
    return chosen[inverse]


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items of the given lengths, (n,) integers up to `capacity`, into windows of that capacity.

    Returns the items of each window in ascending order, the windows by their first item.
    """
    windows: list[list[int]] = []
    open_windows: list[tuple[int, int]] = []  # free tokens and number, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(open_windows, (length,))
        if place < len(open_windows):
            free, window = open_windows.pop(place)
        else:
            free, window = capacity, len(windows)
            windows.append([])
        windows[window].append(item)
        if free > length:
            insort(open_windows, (free - length, window))
    return sorted(map(sorted, windows))


def summary(manifest: Mapping) -> list[str]:
    """Returns lines with the counts of a manifest of conversations: of each split, and what was left out."""
    lines, length = [], manifest["sequence_length"]
    for split, entry in manifest["splits"].items():
        tokens = entry["tokens"] - entry["padding"]
        lines.append(
            f"{split}: {plural(entry['documents'], 'conversation')}, {tokens:,} tokens, of which "
            f"{entry['counted'] / tokens:.0%} count in the loss, in {plural(entry['tokens'] // length, 'window')} of "
            f"{length:,} ({tokens / entry['tokens']:.1%} full)"
        )
    return lines + left_out(manifest["counts"], manifest["first"])


def left_out(counts: Mapping[str, int], first: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason why conversations are left out or changed: how many, and the first."""
    return [
        f"{'kept' if reason in CHANGES else 'left out'}: {plural(count, 'conversation')} {reason}, the first: {first[reason]}"
        for reason, count in counts.items()
    ]


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
