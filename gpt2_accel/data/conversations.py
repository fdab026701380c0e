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
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2_accel.data.documents import HELD_OUT, fitting_share, text_digest
from gpt2_accel.data.messages import Problem, read_messages
from gpt2_accel.data.pairs import EQUAL, PAIR_TOO_LONG, read_pair
from gpt2_accel.data.prepare import make_data, plan_of
from gpt2_accel.data.rows import ROW_SUFFIXES, read_rows, row_suffix
from gpt2_accel.data.shards import (
    COUNTS,
    DTYPES,
    PACKED_VERSION,
    STARTS,
    TOKEN_ID,
    ShardWriter,
    template_digest,
)
from gpt2_accel.data.sources import find_files, state_of, unchanged
from gpt2_accel.runtime.files import first_line
from gpt2_accel.runtime.progress import progress
from gpt2_accel.tokenizer import conversation_tokens, special_tokens, training_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why a conversation is left out, or changed.
NO_ANSWER = "without a message of the assistant that counts, or with none before the cut"
REFUSED = "that the chat template or the tokenizer refuses"
UNMARKED = (
    "an answer is not marked: transformers loses one that begins with a space if the tokenizer's "
    "offsets leave it out"
)
SPECIAL = (
    "with a special token of the tokenizer in a message, which would end a turn, or half a surrogate pair, which is not a "
    "character"
)
TOO_LONG = "of more tokens than a window, whose beginning prepare_data.py chat --cut keeps"
CUT = "cut to the length of a window"
SHORTEST = 64  # tokens of a window
SURROGATE = "[\ud800-\udfff]"
DTYPE = DTYPES["uint32"]
Problems = dict[str, list]
"""For each reason to leave out or change a conversation how often it occurs, and its first place."""


def chat_files(source: str | Path) -> list[str]:
    """Returns a file of conversations, or those below a folder. Raises the errors of `find_files`."""
    kind = f"conversations, in files that end in {', '.join(ROW_SUFFIXES)}"
    return list(map(str, find_files(source, row_suffix, kind)))


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
    `about` are recorded. With `pairs` the files hold pairs of answers (`pairs.py`), and a window of
    twice `sequence_length` tokens holds one pair. Raises `ValueError` for fewer than two different
    conversations, or prompts of pairs, for `cut` of pairs, and the errors of `encode_files` and
    `make_data`.
    """
    if pairs and cut:
        raise ValueError("a pair that is cut may lose what its answers differ in: leave out --cut")
    if Path(model).is_dir():
        model = os.path.relpath(model, data_dir)

    def write(folder: Path, _: dict) -> dict:
        conversations, keys, problems = encode_files(states, tokenizer, sequence_length, cut, pairs)
        if (different := len(np.unique(keys))) < 2:
            kind = "prompt" if pairs else "conversation"
            lines = "".join(f"; {line}" for line in left_out(problems))
            raise ValueError(
                f"{source} holds {plural(different, f'different {kind}')} to train on, and training and validation need "
                f"one each{lines}: add different ones, or correct those that are left out"
            )
        size, entries, chosen = sequence_length, {}, held_out(keys)
        if shorten:
            longest = max(len(row) for tokens in conversations for row in apart(tokens))
            size = min(size, -(-longest // SHORTEST) * SHORTEST)
        for split, mine in (("train", ~chosen), ("val", chosen)):
            own = list(itertools.compress(conversations, mine))
            padding = tokenizer.pad_token_id
            entries[split] = pack(folder, split, own, size, padding, packed, pairs)
        found = {
            "version": PACKED_VERSION,
            "dtype": DTYPE.name,
            "sequence_length": 2 * size if pairs else size,
            "template": template,
            "model": model,
            "left_out": problems,
            "splits": entries,
        }
        if not packed:
            found["packed"] = False
        if pairs:
            found["pairs"] = True
        return found

    template = template_digest(tokenizer)
    states = {file: state_of(file) for file in files}
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
) -> tuple[list[np.ndarray], np.ndarray, Problems]:
    """Returns the tokens of all conversations, or of both of each pair, (n,) uint32 with their bits, their keys, (rows,)
    uint64, and why others are left out, or changed.

    `files` maps files to their `state_of`. The key of a conversation is the hash of its messages, or
    that of the first conversation with the same token ids: a template trims spaces. The key of a pair is the hash of its prompt.
    Conversations of more than `longest` tokens are left out unless `cut` is True. Raises the errors of
    `read_messages`, `read_pair` and `unchanged`, and `ValueError` for a line that is not JSON in UTF-8.
    """
    encode = encode_pair if pairs else encode_row
    special = re.compile("|".join([SURROGATE, *map(re.escape, special_tokens(tokenizer))]))
    conversations, keys, problems = [], [], {}
    first_keys: dict[bytes, int] = {}
    for path in progress(files, "tokenizing", len(files)):
        for row, place in unchanged(read_rows(path, strict=True), path, files[path]):
            reason = None
            try:
                tokens, key = encode(tokenizer, special, row, place)
                if max(map(len, apart(tokens))) > longest:
                    if not cut:
                        raise Problem(PAIR_TOO_LONG if pairs else TOO_LONG)
                    reason = CUT
                    tokens = tokens[:longest]
                if not (tokens & COUNTS).any():
                    raise Problem(NO_ANSWER)
                conversations.append(tokens)
                ids = sha256(tokens & TOKEN_ID).digest()
                keys.append(first_keys.setdefault(ids, key))
            except Problem as problem:
                reason = str(problem)
            if reason:
                problems.setdefault(reason, [0, place])[0] += 1
    return conversations, np.array(keys, np.uint64), problems


def encode_pair(
    tokenizer: "PreTrainedTokenizerBase", special: re.Pattern, row: Any, place: str
) -> tuple[np.ndarray, int]:
    """Returns the tokens of the chosen and then of the rejected conversation, and the hash of their prompt. Only the last answers
    count. The arguments and errors are those of `encode_row`, with those of `read_pair`."""
    found, pair = [], read_pair(row, place)
    for *asked, answer in pair:
        weighted = [{**message, "weight": 0} for message in asked]
        tokens, _ = encode_row(tokenizer, special, {"messages": [*weighted, answer]}, place)
        found.append(tokens)
    if np.array_equal(*found):  # a template trims spaces
        raise Problem(EQUAL)
    return np.concatenate(found), message_key(pair[0][:-1])


def message_key(messages: list[dict[str, str]]) -> int:
    """Returns the hash of messages, below 2^64."""
    return int(text_digest(json.dumps(messages, sort_keys=True))[:16], 16)


def encode_row(
    tokenizer: "PreTrainedTokenizerBase", special: re.Pattern, row: Any, place: str
) -> tuple[np.ndarray, int]:
    """Returns the tokens of a row with their bits, (n,) uint32, and the hash of its messages.

    `special` matches what a message must not hold. Raises `Problem`, and the errors of `read_messages`.
    """
    messages, counted = read_messages(row, place)
    if any(special.search(message["content"]) for message in messages):
        raise Problem(SPECIAL)
    answers = [c for c, m in zip(counted, messages, strict=True) if m["role"] == "assistant"]
    if not any(answers):
        raise Problem(NO_ANSWER)
    try:
        ids, counts = conversation_tokens(tokenizer, messages)
    except Exception as error:  # of the template's author, or of the tokenizer
        raise Problem(f"{REFUSED} ({first_line(error)})") from error
    groups = [role for role, _ in itertools.groupby(message["role"] for message in messages)]
    if len(marked_runs(counts)) < groups.count("assistant"):
        raise Problem(f"{REFUSED} ({UNMARKED})")
    if not all(answers):
        mask_answers(counts, answers)
    counts[0] = False  # nothing comes before it
    tokens = ids.astype(DTYPE) | COUNTS * counts
    tokens[0] |= STARTS
    return tokens, message_key(messages)


def mask_answers(counts: np.ndarray, answers: Sequence[bool]) -> None:
    """Sets `counts`, (n,) bool, to False where an answer that does not count is marked; the k-th run of True is the
    k-th answer. Raises `Problem` if a template marks an answer in several runs, or several answers in one."""
    runs = marked_runs(counts)
    if len(runs) != len(answers):
        raise Problem(f"{REFUSED} (the template does not mark each answer by itself)")
    for (start, end), answer in zip(runs.tolist(), answers, strict=True):
        if not answer:
            counts[start:end] = False


def marked_runs(counts: np.ndarray) -> np.ndarray:
    """Returns the first token of each run of True, and the one after its last, (runs, 2)."""
    return np.flatnonzero(np.diff(counts, prepend=False, append=False)).reshape(-1, 2)


# From tokens to windows


def held_out(keys: np.ndarray) -> np.ndarray:
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
    conversations: Sequence[np.ndarray],
    size: int,
    padding: int,
    packed: bool,
    pairs: bool,
) -> dict:
    """Writes the shard of a split, in windows of `size` tokens, and what each counts for in an update, its targets; returns
    its entry in the manifest. `padding` is a token id. Without `packed` a window has one conversation. With `pairs` it is
    two rows of `size` tokens, and counts once."""
    windows = [[number] for number in range(len(conversations))]
    if packed and not pairs:
        windows = best_fit(np.array([*map(len, conversations)]), size)
    writer, weights = ShardWriter(folder / f"{split}_000000.bin", DTYPE, PACKED_VERSION), []
    counted = 0
    for window in progress(windows, f"packing {split}", len(windows)):
        tokens = np.concatenate([conversations[i] for i in window])
        for row in apart(tokens) if pairs else [tokens]:
            writer.append(np.pad(row, (0, size - len(row)), constant_values=padding))
        targets = np.count_nonzero(tokens & COUNTS)
        counted += targets
        weights.append(1 if pairs else targets)
    writer.documents = len(conversations)
    weight_writer = ShardWriter(folder / f"{split}_targets.bin", DTYPE)
    weight_writer.append(np.array(weights))
    return {
        "tokens": writer.tokens,
        "documents": len(conversations),
        "bytes": None,
        "counted": int(counted),
        "padding": writer.tokens - sum(map(len, conversations)),
        "targets": weight_writer.close(),
        "shards": [writer.close()],
    }


def apart(tokens: np.ndarray) -> list[np.ndarray]:
    """Divides tokens with their bits, (n,), where a conversation begins."""
    return np.split(tokens, np.flatnonzero(tokens & STARTS)[1:])


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
    return lines + left_out(manifest["left_out"], kind)


def left_out(problems: Problems, kind: str = "conversation") -> list[str]:
    """Returns a line for each reason why rows, each a `kind`, are left out or changed: how many, and the first."""
    return [
        f"{'kept' if reason == CUT else 'left out'}: {plural(count, kind)} {reason}, the first: {first}"
        for reason, (count, first) in problems.items()
    ]


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
