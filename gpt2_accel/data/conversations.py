"""Conversations: messages become tokens in the chat template, and windows of whole conversations.

The tokens that the template marks as the assistant's count in the loss. Windows are packed by best fit over ordered
lengths (best-fit decreasing, Ding et al., 2024, arXiv:2404.10830) and padded; a conversation is never divided.
"""

import json
import os
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2_accel.data.documents import fitting_share, name_digest
from gpt2_accel.data.messages import Problem, read_messages
from gpt2_accel.data.prepare import SHARD_TOKENS, clean, make_data, plan_of
from gpt2_accel.data.rows import read_rows
from gpt2_accel.data.shards import (
    COUNTS,
    PACKED_VERSION,
    STARTS,
    TOKEN_ID,
    ShardWriter,
    template_digest,
    token_dtype,
)
from gpt2_accel.data.sources import ROW_SUFFIXES, find_files, state_of
from gpt2_accel.files import first_line
from gpt2_accel.progress import progress
from gpt2_accel.tokenizer import conversation_tokens, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".json", *ROW_SUFFIXES)
# Why a conversation is left out, or changed.
NO_ANSWER = "without a message of the assistant that counts, or with none before the cut"
REFUSED = "that the chat template or the tokenizer refuses"
SPECIAL = "with a special token of the tokenizer in a message, which would end a turn"
TOO_LONG = "of more tokens than a window, whose beginning --cut keeps"
CUT = "cut to the length of a window"
SHORTEST = 64  # tokens of a window
HELD_OUT = 20  # one conversation in 20 is for validation
DTYPE = token_dtype(2**32)


def chat_files(source: str | Path) -> list[str]:
    """Returns a file of conversations, or those below a folder. Raises the errors of `find_files`."""
    kind = f"conversations, in files that end in {', '.join(SUFFIXES)}"
    return list(map(str, find_files(source, lambda path: path.name.endswith(SUFFIXES), kind)))


def prepare_conversations(
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    sequence_length: int,
    source: str,
    model: str,
    cut: bool = False,
    shorten: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    **about: str | None,
) -> dict:
    """Writes the conversations in `files` into `data_dir`, in windows of `sequence_length` tokens; returns the manifest.

    `tokenizer` has a chat template that marks the assistant's tokens, and a `pad_token`, as `hf/chat_template.py` makes it.
    A conversation that is longer than a window is left out; with `cut` its beginning is kept. With `shorten` the windows
    are as long as the longest conversation, in multiples of `SHORTEST`, and at most `sequence_length`. `source`, `model` (a
    directory relative to `data_dir`) and `about` are recorded. Raises `ValueError` for a row in none of the
    forms and if a split would be empty, and the errors of `make_data`.
    """
    if Path(model).is_dir():
        model = os.path.relpath(model, data_dir)

    def write(folder: Path) -> dict:
        stored = folder / "tokens"
        special = re.compile("|".join(map(re.escape, special_tokens(tokenizer))))
        encode = partial(encode_row, tokenizer, special, sequence_length)
        places, counts, first = encode_files(files, encode, cut, stored)
        chosen = held_out(places[:, 2])
        size, entries = sequence_length, {}
        if shorten and len(places):
            size = min(size, -(-int(places[:, 1].max()) // SHORTEST) * SHORTEST)
        for split, own in (("train", places[~chosen]), ("val", places[chosen])):
            if not len(own):
                lines = "".join(f"; {line}" for line in left_out(counts, first))
                raise ValueError(
                    f"{source} holds no conversation for the split {split!r}, and each split needs one{lines}: add "
                    "different conversations, or correct those that are left out"
                )
            tokens = np.memmap(stored, DTYPE, "r")
            padding = tokenizer.pad_token_id
            entries[split] = pack(folder, split, tokens, own, size, padding, shard_tokens)
        stored.unlink()
        kind = {"version": PACKED_VERSION, "dtype": DTYPE.name, "sequence_length": size}
        found = {"counts": counts, "first": first, "splits": entries}
        return {**kind, "template": template, "model": model, **found}

    template = template_digest(tokenizer)
    states = [(file, *state_of(file)) for file in files]
    options = template, sequence_length, cut, model, shard_tokens, shorten
    plan = plan_of(states, tokenizer, *options)
    return make_data(write, tokenizer, data_dir, plan, source=source, **about)


# From rows to tokens


def encode_files(
    files: Sequence[str], encode: Callable, cut: bool, stored: Path
) -> tuple[np.ndarray, Counter, dict[str, str]]:
    """Writes the tokens of all conversations, uint32 with `STARTS` and `COUNTS`, into the file `stored`.

    `encode(row, place)` is `encode_row`. Conversations of more tokens are left out unless `cut` is True.
    Returns their places, (conversations, 3) uint64: the first token in the file, the number of tokens and the hash of the
    messages; and for each reason to leave out or change a conversation how often it occurs and its first place.
    """
    counts, first, places, end = Counter(), {}, [], 0
    with open(stored, "wb") as file:
        for path in progress(files, "tokenizing", len(files)):
            for row, place in read_rows(path):
                try:
                    tokens, key, longer = encode(row, place)
                    if longer and not cut:
                        raise Problem(TOO_LONG)
                    if not (tokens & COUNTS).any():
                        raise Problem(NO_ANSWER)
                    reason = CUT if longer else None
                    places.append((end, len(tokens), key))
                    end += len(tokens)
                    file.write(tokens.tobytes())
                except Problem as problem:
                    reason = str(problem)
                if reason:
                    counts[reason] += 1
                    first.setdefault(reason, place)
    return np.array(places, np.uint64).reshape(-1, 3), counts, first


def encode_row(
    tokenizer: "PreTrainedTokenizerBase", special: re.Pattern, longest: int, row: Any, place: str
) -> tuple[np.ndarray, int, bool]:
    """Returns the first `longest` tokens of a row with their bits, (n,) uint32, the hash of its messages, and whether it has
    more tokens.

    `special` matches a special token in a message. Invalid bytes and characters become U+FFFD. Raises `Problem`, and the
    errors of `read_messages`.
    """
    messages, counted = read_messages(row, place)
    for message in messages:
        message["content"], _ = clean(message["content"])
        if special.search(message["content"]):
            raise Problem(SPECIAL)
    answers = [c for c, m in zip(counted, messages, strict=True) if m["role"] == "assistant"]
    if not any(answers):
        raise Problem(NO_ANSWER)
    try:
        ids, counts = conversation_tokens(tokenizer, messages)
    except Exception as error:  # of the template's author, or of the tokenizer
        raise Problem(f"{REFUSED} ({first_line(error)})") from error
    if not all(answers):
        mask_answers(counts, answers)
    tokens = ids[:longest].astype(DTYPE)
    tokens[counts[:longest]] |= COUNTS
    tokens[0] = tokens[0] & TOKEN_ID | STARTS  # nothing comes before it
    key = int(name_digest(json.dumps(messages, sort_keys=True))[:16], 16)
    return tokens, key, len(ids) > longest


def mask_answers(counts: np.ndarray, answers: Sequence[bool]) -> None:
    """Sets `counts`, (n,) bool, to False where an answer that does not count is marked; the k-th run of True is the
    k-th answer. Raises `Problem` if a template marks an answer in several runs, or several answers in one."""
    runs = np.flatnonzero(np.diff(counts, prepend=False, append=False)).reshape(-1, 2)
    if len(runs) != len(answers):
        raise Problem(f"{REFUSED} (the template does not mark each answer by itself)")
    for (start, end), answer in zip(runs.tolist(), answers, strict=True):
        if not answer:
            counts[start:end] = False


# From tokens to windows


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


def pack(
    folder: Path,
    split: str,
    stored: np.ndarray,
    places: np.ndarray,
    size: int,
    padding: int,
    shard_tokens: int,
) -> dict:
    """Writes the shards of a split, in windows of `size` tokens, and the counted targets of these; returns its entry in
    the manifest.

    `places`, (conversations, 3), are those of `encode_files` in `stored`, all tokens. `padding` is a token id.
    """
    starts, lengths = places[:, :2].astype(np.int64).T
    windows = best_fit(lengths, size)
    each = max(1, shard_tokens // size)
    shards, targets = [], []
    for begin in range(0, len(windows), each):
        name, group = f"{split}_{begin // each:06d}.bin", windows[begin : begin + each]
        writer = ShardWriter(folder / name, DTYPE, PACKED_VERSION)
        for window in progress(group, f"packing {name}", len(group)):
            pieces = [stored[starts[i] : starts[i] + lengths[i]] for i in window]
            tokens = np.concatenate(pieces)
            writer.append(np.pad(tokens, (0, size - len(tokens)), constant_values=padding))
            targets.append(np.count_nonzero(tokens & COUNTS))
        writer.documents = sum(map(len, group))
        shards.append(writer.close())
    writer = ShardWriter(folder / f"{split}_targets.bin", DTYPE)
    writer.append(np.array(targets))
    tokens = len(windows) * size
    return {
        "tokens": tokens,
        "documents": len(places),
        "bytes": None,
        "counted": int(sum(targets)),
        "padding": tokens - int(lengths.sum()),
        "targets": writer.close(),
        "shards": shards,
    }


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


# What was prepared


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
        f"{'kept' if reason == CUT else 'left out'}: {plural(count, 'conversation')} {reason}, the first: {first[reason]}"
        for reason, count in counts.items()
    ]


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
