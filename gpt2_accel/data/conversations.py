"""Conversations: messages become tokens in the chat template, and windows of whole conversations.

The tokens that the template marks as the assistant's count in the loss. Windows are packed by best fit over ordered
lengths (best-fit decreasing, Ding et al., 2024, arXiv:2404.10830) and padded; a conversation is never divided. A pair of
answers has a window of its own: its first half is the chosen conversation, its second the rejected, both padded. A
preparation holds all tokens in memory, 4 bytes each, and writes a shard per split.
"""

import itertools
import json
import os
import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2_accel.data.chat_tokens import conversation_tokens, training_template
from gpt2_accel.data.documents import HELD_OUT, fitting_share, text_digest
from gpt2_accel.data.messages import EQUAL, Problem, read_messages, read_pair
from gpt2_accel.data.prepare import make_data, plan_of
from gpt2_accel.data.rows import read_rows
from gpt2_accel.data.shards import (
    COUNTS,
    PACKED_VERSION,
    STARTS,
    TOKEN_DTYPES,
    TOKEN_ID,
    ShardWriter,
    template_digest,
)
from gpt2_accel.data.sources import state_of, unchanged
from gpt2_accel.runtime.files import first_line
from gpt2_accel.runtime.progress import progress
from gpt2_accel.tokenizer import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why a conversation or a pair is left out, or changed.
NO_ANSWER = "without a message of the assistant that counts, or with none before the cut"
REFUSED = "that the chat template or the tokenizer refuses"
UNMARKED = (
    f"{REFUSED} (an answer is not marked: transformers loses one that begins with a space if the tokenizer's offsets leave it "
    "out)"
)
MERGED = f"{REFUSED} (the template does not mark each answer by itself)"
SPECIAL = (
    "with a special token of the tokenizer in a message, which would end a turn, or half a surrogate pair, which is not a "
    "character"
)
TOO_LONG = "of more tokens than a window; --cut keeps the beginning of conversations"
CUT = "cut to the length of a window"
SHORTEST = 64  # tokens of a window
SURROGATE = "[\ud800-\udfff]"
DTYPE = TOKEN_DTYPES["uint32"]


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
    packed: bool = True,
    pairs: bool = False,
    **about: str | None,
) -> dict:
    """Writes the conversations in `files` into `data_dir`, in windows of `sequence_length` tokens; returns the manifest.

    `tokenizer` has a chat template to train with, and a `pad_token`, as `hf/chat_template.py` makes
    it. A conversation that is longer than a window is left out; with `cut` its beginning is kept.
    With `shorten` the windows are as long as the longest conversation, in multiples of `SHORTEST`,
    and at most `sequence_length`. Without `packed` a window holds one
    conversation. `source`, `model` (a directory relative to `data_dir`) and
    `about` are recorded. With `pairs` the files hold pairs of answers (`messages.py`), and a window of
    twice `sequence_length` tokens holds one pair. Raises `ValueError` for fewer than two different
    conversations, or prompts of pairs, for `cut` of pairs, and the errors of `encode_files` and
    `make_data`.
    """
    if pairs and cut:
        raise ValueError("a pair that is cut may lose what its answers differ in: leave out --cut")
    if Path(model).is_dir():
        model = os.path.relpath(model, data_dir)
    template = template_digest(tokenizer)
    states = {file: state_of(file) for file in files}

    def write(folder: Path, _: dict) -> dict:
        items, keys, problems = encode_files(states, tokenizer, sequence_length, cut, pairs)
        different = len(np.unique(keys))
        if different < 2:
            kind = "different prompt" if pairs else "different conversation"
            lines = "; ".join(["", *left_out(problems)])
            raise ValueError(
                f"{source} holds {plural(different, kind)} to train on, and training and validation need one each{lines}: add "
                "different ones, or correct those that are left out"
            )
        size = sequence_length
        if shorten:
            longest = max(map(len, itertools.chain.from_iterable(items)))
            size = min(size, -(-longest // SHORTEST) * SHORTEST)
        chosen = validation_mask(keys)
        entries = {}
        for split, mine in (("train", ~chosen), ("val", chosen)):
            own = list(itertools.compress(items, mine))
            entries[split] = pack(folder, split, own, size, tokenizer.pad_token_id, packed)
        return {
            "version": PACKED_VERSION,
            "dtype": DTYPE.name,
            "sequence_length": 2 * size if pairs else size,
            "template": template,
            "model": model,
            "packed": packed,
            "pairs": pairs,
            "left_out": problems,
            "splits": entries,
        }

    listed = [(file, *state) for file, state in states.items()]
    options = [sequence_length, cut, model, shorten]
    training = training_template(tokenizer)
    if training != tokenizer.chat_template:  # of a release of TRL
        options.append(training)
    if not packed:  # else the plan is that of former releases
        options.append(packed)
    if pairs:
        options.append("pairs")
    plan = plan_of(listed, tokenizer, template, *options)
    return make_data(write, tokenizer, data_dir, plan, source=source, **about)


# From rows to tokens


def encode_files(
    files: Mapping[str, tuple],
    tokenizer: "PreTrainedTokenizerBase",
    longest: int,
    cut: bool,
    pairs: bool,
) -> tuple[list[list[np.ndarray]], np.ndarray, dict[str, list]]:
    """Returns the items, each the tokens of a conversation, or of both of a pair, (n,) uint32 with their bits; their keys,
    (items,) uint64; and for each reason why others are left out, or changed, how often and where first.

    `files` maps files to their `state_of`. The key of a conversation is the hash of its messages, or
    that of the first conversation with the same token ids: a template trims spaces. The key of a pair is the hash of its prompt.
    Conversations of more than `longest` tokens are left out unless `cut` is True. Raises the errors of
    `read_rows`, `read_messages`, `read_pair` and `unchanged`.
    """
    special = re.compile("|".join([SURROGATE, *map(re.escape, special_tokens(tokenizer))]))
    items = []
    keys = []
    problems: dict[str, list[Any]] = {}
    first_keys: dict[int, int] = {}
    for path in progress(files, "tokenizing", len(files)):
        for row, place in unchanged(read_rows(path), path, files[path]):
            reason = None
            try:
                if pairs:
                    item, prompt = encode_pair(tokenizer, special, row, place)
                else:
                    prompt, counted = read_messages(row, place)
                    item = [encode_messages(tokenizer, special, prompt, counted)]
                if max(map(len, item)) > longest:
                    if not cut:
                        raise Problem(TOO_LONG)
                    reason = CUT
                    item = [item[0][:longest]]
                if not (item[0] & COUNTS).any():
                    raise Problem(NO_ANSWER)
                items.append(item)
                key = int(text_digest(json.dumps(prompt, sort_keys=True))[:16], 16)
                ids = hash((np.concatenate(item) & TOKEN_ID).tobytes())
                keys.append(first_keys.setdefault(ids, key))
            except Problem as problem:
                reason = str(problem)
            if reason:
                problems.setdefault(reason, [0, place])[0] += 1
    return items, np.array(keys, np.uint64), problems


def encode_pair(
    tokenizer: "PreTrainedTokenizerBase", special: re.Pattern, row: Any, place: str
) -> tuple[list[np.ndarray], list[dict[str, str]]]:
    """Returns the tokens of the chosen and of the rejected conversation, of which only the last answers count, and the messages
    of the prompt. Raises the errors of `read_pair` and `encode_messages`."""
    item = []
    pair = read_pair(row, place)
    for messages in pair:
        counted = [False] * len(messages)
        counted[-1] = True
        item.append(encode_messages(tokenizer, special, messages, counted))
    if np.array_equal(item[0], item[1]):  # a template trims spaces
        raise Problem(EQUAL)
    return item, pair[0][:-1]


def encode_messages(
    tokenizer: "PreTrainedTokenizerBase",
    special: re.Pattern,
    messages: list[dict[str, str]],
    counted: list[bool],
) -> np.ndarray:
    """Returns the tokens of messages with their bits, (n,) uint32; `counted` says which messages may count.

    `special` matches what a message must not hold. Raises `Problem`, also if some answers do not count and the template does
    not mark each by itself.
    """
    if any(special.search(message["content"]) for message in messages):
        raise Problem(SPECIAL)
    roles = np.array([message["role"] for message in messages])
    answers = np.array(counted)[roles == "assistant"]
    if not answers.any():
        raise Problem(NO_ANSWER)
    try:
        ids, counts = conversation_tokens(tokenizer, messages)
    except Exception as error:  # of the template's author, or of the tokenizer
        raise Problem(f"{REFUSED} ({first_line(error)})") from error
    runs = marked_runs(counts)
    if len(runs) < len(marked_runs(roles == "assistant")):
        raise Problem(UNMARKED)
    if not answers.all():
        if len(runs) != len(answers):
            raise Problem(MERGED)
        for start, end in runs[~answers].tolist():
            counts[start:end] = False
    counts[0] = False  # nothing comes before it
    tokens = ids.astype(DTYPE) | COUNTS * counts
    tokens[0] |= STARTS
    return tokens


def marked_runs(counts: np.ndarray) -> np.ndarray:
    """Returns the first position of each run of True, and the one after its last, (runs, 2)."""
    return np.flatnonzero(np.diff(counts, prepend=False, append=False)).reshape(-1, 2)


# From tokens to windows


def validation_mask(keys: np.ndarray) -> np.ndarray:
    """Returns which conversations are for validation, (n,) bool, by the hashes of their messages, (n,) uint64.

    It is one in `HELD_OUT` of the different conversations. If these are no `fitting_share` of them,
    it is the 20th part with the lowest hashes, at least one.
    """
    keys, inverse = np.unique(keys, return_inverse=True)
    chosen = keys % np.uint64(HELD_OUT) == 0
    if not fitting_share(chosen.mean()):
        chosen = np.arange(len(keys)) < max(1, round(len(keys) / HELD_OUT))
    return chosen[inverse]


def pack(
    folder: Path,
    split: str,
    items: Sequence[list[np.ndarray]],
    size: int,
    padding: int,
    packed: bool,
) -> dict:
    """Writes the shard of a split, in windows of `size` tokens, and what each counts for in an update, its targets; returns
    its entry in the manifest. `padding` is a token id. Without `packed` a window has one conversation. A window of a pair
    is two rows of `size` tokens, and counts once."""
    lengths = np.array([sum(map(len, item)) for item in items])
    pairs = len(items[0]) > 1
    windows = [[number] for number in range(len(items))]
    if packed and not pairs:
        windows = best_fit(lengths, size)
    writer = ShardWriter(folder / f"{split}_000000.bin", DTYPE, PACKED_VERSION)
    writer.documents = len(items)
    targets = []
    counted = 0
    for window in progress(windows, f"packing {split}", len(windows)):
        rows = items[window[0]]
        if not pairs:
            rows = [np.concatenate([items[i][0] for i in window])]
        found = 0
        for row in rows:
            writer.append(np.pad(row, (0, size - len(row)), constant_values=padding))
            found += int(np.count_nonzero(row & COUNTS))
        counted += found
        targets.append(1 if pairs else found)
    target_writer = ShardWriter(folder / f"{split}_targets.bin", DTYPE)
    target_writer.append(np.array(targets))
    return {
        "tokens": writer.tokens,
        "documents": len(items),
        "bytes": None,
        "counted": counted,
        "padding": writer.tokens - int(lengths.sum()),
        "targets": target_writer.close(),
        "shards": [writer.close()],
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
            free = capacity
            window = len(windows)
            windows.append([])
        windows[window].append(item)
        if free > length:
            insort(open_windows, (free - length, window))
    return sorted(map(sorted, windows))


# What was prepared


def summary(manifest: Mapping) -> list[str]:
    """Returns lines with the counts of a manifest of conversations: of each split, and what was left out."""
    lines = []
    length = manifest["sequence_length"]
    kind = "pair" if manifest.get("pairs") else "conversation"
    for split, entry in manifest["splits"].items():
        tokens = entry["tokens"] - entry["padding"]
        lines.append(
            f"{split}: {plural(entry['documents'], kind)}, {tokens:,} tokens, of which "
            f"{entry['counted'] / tokens:.0%} count in the loss, in {plural(entry['tokens'] // length, 'window')} of "
            f"{length:,} ({tokens / entry['tokens']:.1%} full)"
        )
    if not manifest.get("packed", True):
        lines.append("each window has one conversation: the model does not keep several apart")
    return lines + left_out(manifest["left_out"])


def left_out(problems: dict[str, list]) -> list[str]:
    """Returns a line for each reason why rows are left out or changed: how many, and the first."""
    return [
        f"{'kept' if reason == CUT else 'left out'}: {plural(count, 'row')} {reason}, the first: {first}"
        for reason, (count, first) in problems.items()
    ]


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
