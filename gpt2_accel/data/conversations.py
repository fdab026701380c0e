"""Conversations: messages become tokens in the chat template, and windows of conversations.

The tokens that the template marks as the assistant's count in the loss. Windows are packed by best
fit over ordered lengths (best-fit decreasing, Ding et al., 2024, arXiv:2404.10830) and padded; a
conversation is never divided. A pair of answers has its own window: the first half is the
chosen conversation, the second half the rejected, both padded. A preparation holds all tokens in
memory, 4 bytes each, and writes one shard per split.
"""

import copy
import json
import os
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_accel.data.chat_tokens import conversation_tokens, training_template
from gpt2_accel.data.documents import HELD_OUT, fitting_share, text_digest
from gpt2_accel.data.messages import EMPTY, EQUAL, Message, Problem, read_messages, read_pair
from gpt2_accel.data.prepare import make_data, plan_of
from gpt2_accel.data.rows import read_rows, row_suffix
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
from gpt2_accel.rounding import round_up
from gpt2_accel.runtime.files import first_line
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, special_pattern

# Why a conversation or a pair is left out, or changed.
NO_ANSWER = "without a message of the assistant that counts, or with none before the cut"
REFUSED = "that the chat template or the tokenizer refuses"
UNMARKED = (
    f"{REFUSED} (an answer is not marked, or not by itself: transformers loses one that begins "
    "with a space if the tokenizer's offsets leave it out)"
)
SPECIAL = (
    "with a special token of the tokenizer in a message, which would end a turn, or half a "
    "surrogate pair, which is not a character"
)
TOO_LONG = "of more tokens than a window; raise {} to keep them"
CUT = "cut to the length of a window"
SHORTEST = 64  # tokens of a window
PADDING = "<|pad|>"
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
    longer: str = "sequence_length",
    **about: str | None,
) -> dict:
    """Writes the conversations in `files` into `data_dir`, in windows of `sequence_length` tokens.

    `tokenizer` has a chat template to train with and a `pad_token`, as from `hf/chat_template.py`.
    `cut` keeps the beginning of a conversation that is longer than a window; otherwise the
    conversation is left out. `shorten` makes the windows as long as the longest conversation, in
    multiples of `SHORTEST`, and at most `sequence_length`. `packed` puts several conversations into
    a window. With `pairs` the files hold pairs of answers (`messages.py`), and a window of twice
    `sequence_length` tokens holds one pair. `longer` names the option that keeps what is left out
    as too long. `source`, `model` (a directory relative to `data_dir`)
    and `about` are recorded.

    Returns the manifest. Raises `ValueError` for fewer than two different conversations or prompts,
    for `cut` with `pairs` and for rows of another form; `OSError` if a file has changed or the
    folder is in use.
    """
    if pairs and cut:
        raise ValueError("a cut pair may lose the difference of its answers: leave out --cut")
    if Path(model).is_dir():
        model = os.path.relpath(model, data_dir)
    states = {file: state_of(file) for file in files}
    writer = ConversationWriter(
        states, tokenizer, source, model, longer, sequence_length, cut, shorten, packed, pairs
    )
    return make_data(writer.write, tokenizer, data_dir, writer.plan(), source=source, **about)


def with_padding(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Returns a tokenizer whose padding is not the end of a turn.

    Its fingerprint identifies prepared data. Runs of 0.6 find their folders by it.
    """
    if tokenizer.pad_token != tokenizer.eos_token:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([PADDING], special_tokens=True)
    return tokenizer


@dataclass
class ConversationWriter:
    """Tokenizes conversations or pairs of answers, and writes their windows.

    The fields are those of `prepare_conversations`; `files` maps paths to their `state_of`.
    """

    files: dict[str, tuple]
    tokenizer: "PreTrainedTokenizerBase"
    source: str
    model: str
    longer: str
    sequence_length: int
    cut: bool
    shorten: bool
    packed: bool
    pairs: bool

    def __post_init__(self) -> None:
        special = re.compile(f"[\ud800-\udfff]|{special_pattern(self.tokenizer).pattern}")
        self.encode = partial(encode_messages, self.tokenizer, special)

    def plan(self) -> str:
        """Returns the plan of `make_data`."""
        listed = [(file, *state) for file, state in self.files.items()]
        options: list[Any] = [self.sequence_length, self.cut, self.model, self.shorten]
        training = training_template(self.tokenizer)
        if training != self.tokenizer.chat_template:  # TRL's releases differ
            options.append(training)
        if not self.packed:  # packed data keeps the plan of earlier releases
            options.append(self.packed)
        if self.pairs:
            options.append("pairs")
        return plan_of(
            listed, with_padding(self.tokenizer), template_digest(self.tokenizer), *options
        )

    def write(self, folder: Path, _: dict) -> dict:
        """Writes the shards into a folder; returns the entries of the manifest for `make_data`."""
        items, keys, problems = self.encode_files()
        different = len(np.unique(keys))
        if different < 2:
            kind = "different prompt" if self.pairs else "different conversation"
            lines = "".join(f"; {line}" for line in left_out(problems))
            raise ValueError(
                f"{self.source} holds {plural(different, kind)} to train on, and training and "
                f"validation need one each{lines}: add different ones, or correct those that are "
                "left out"
            )
        size = self.sequence_length
        if self.shorten:
            size = min(size, round_up(max(map(len, chain(*items))), SHORTEST))
        chosen = validation_mask(keys)
        splits = {}
        for split, mine in (("train", ~chosen), ("val", chosen)):
            splits[split] = self.pack(folder, split, list(compress(items, mine)), size)
        return {
            "version": PACKED_VERSION,
            "dtype": DTYPE.name,
            "sequence_length": 2 * size if self.pairs else size,
            "template": template_digest(self.tokenizer),
            "model": self.model,
            "packed": self.packed,
            "pairs": self.pairs,
            "left_out": problems,
            "splits": splits,
        }

    def encode_files(self) -> tuple[list[list[np.ndarray]], np.ndarray, dict[str, list]]:
        """Tokenizes the conversations or pairs in the files.

        Returns three values. The items: a list with the tokens of a conversation, or of the chosen
        and the rejected one, each (n,) uint32 with their bits. The keys, (items,) uint64: a hash of
        the messages or of a pair's prompt; conversations with equal token ids have one key, since a
        template trims spaces. The problems: for each reason why rows are left out or changed, the
        number of rows and the place of the first.

        Raises `ValueError` for a row of another form or a file that cannot be read, and
        `ChangedSource`.
        """
        items = []
        keys = []
        problems: dict[str, list[Any]] = {}
        first_keys: dict[int, int] = {}
        for path in Progress("tokenizing", len(self.files), self.files):
            for row, place in unchanged(read_rows(path), path, self.files[path]):
                try:
                    if row_suffix(path) in (".parquet", ".arrow"):
                        text = json.dumps(row, default=str)
                        row = json.loads(text, object_pairs_hook=without_nulls)
                    item, prompt, reason = self.encode_row(row, place)
                    items.append(item)
                    key = int(text_digest(json.dumps(prompt, sort_keys=True))[:16], 16)
                    ids = hash((np.concatenate(item) & TOKEN_ID).tobytes())
                    keys.append(first_keys.setdefault(ids, key))
                except Problem as problem:
                    reason = str(problem)
                if reason:
                    problems.setdefault(reason, [0, place])
                    problems[reason][0] += 1
        return items, np.array(keys, np.uint64), problems

    def encode_row(self, row: Any, place: str) -> tuple[list[np.ndarray], list[Message], str]:
        """Returns the item of a row, its messages or a pair's prompt, and `CUT` if it is cut.

        Only the last answers of a pair count. Raises `Problem` for a row that is left out, and
        `ValueError` for one of another form.
        """
        if row is None:
            raise Problem(EMPTY)
        if self.pairs:
            both: Sequence[list[Message]] = read_pair(row, place)
            prompt = both[0][:-1]
            counted = [False] * len(prompt) + [True]
        else:
            prompt, counted = read_messages(row, place)
            both = [prompt]
        item = [self.encode(messages, counted, row.get("tools")) for messages in both]
        if self.pairs and np.array_equal(item[0], item[1]):  # a template trims spaces
            raise Problem(EQUAL)
        reason = ""
        if max(map(len, item)) > self.sequence_length:
            if not self.cut:
                raise Problem(TOO_LONG.format(self.longer))
            reason = CUT
            item = [item[0][: self.sequence_length]]
        if not (item[0] & COUNTS).any():
            raise Problem(NO_ANSWER)
        return item, prompt, reason

    def pack(
        self, folder: Path, split: str, items: Sequence[list[np.ndarray]], size: int
    ) -> dict[str, Any]:
        """Writes the shards of a split, tokens and targets; returns its entry in the manifest.

        A window has `size` tokens, filled up with padding; its target is the number of its counted
        tokens. Without `packed` a window has one conversation. The window of a pair is two rows of
        `size` tokens, and its target is 1.
        """
        lengths = np.array([sum(map(len, item)) for item in items])
        windows = [[number] for number in range(len(items))]
        if self.packed and not self.pairs:
            windows = best_fit(lengths, size)
        writer = ShardWriter(folder / f"{split}_000000.bin", DTYPE, PACKED_VERSION)
        writer.documents = len(items)
        targets = []
        counted = 0
        for window in Progress(f"packing {split}", len(windows), windows):
            found = 0
            for parts in zip(*(items[i] for i in window), strict=True):
                row = np.concatenate(parts)
                padding = self.tokenizer.pad_token_id
                writer.append(np.pad(row, (0, size - len(row)), constant_values=padding))
                found += int(np.count_nonzero(row & COUNTS))
            counted += found
            targets.append(1 if self.pairs else found)
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


# Rows and windows


def without_nulls(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a struct that are not null: in a table each has those of all others."""
    return {name: value for name, value in fields if value is not None}


def encode_messages(
    tokenizer: "PreTrainedTokenizerBase",
    special: re.Pattern,
    messages: list[Message],
    counted: list[bool],
    tools: Any = None,
) -> np.ndarray:
    """Returns the tokens of messages with their bits, (n,) uint32.

    `counted` says which messages may count. `special` matches what messages and tools, JSON schemas
    or their JSON, must not contain.
    A line end after the end of a turn does not count. Raises `Problem`, also if some
    answers do not count and the template does not mark each answer by itself.
    """
    if special.search(json.dumps([messages, tools], ensure_ascii=False)):
        raise Problem(SPECIAL)
    roles = np.array([message["role"] for message in messages])
    answers = np.array(counted)[roles == "assistant"]
    if not answers.any():
        raise Problem(NO_ANSWER)
    try:
        if isinstance(tools, str):
            tools = json.loads(tools or "null")
        ids, counts = conversation_tokens(tokenizer, messages, tools or None)
    except Exception as error:  # templates and tokenizers raise many types
        raise Problem(f"{REFUSED} ({first_line(error)})") from error
    runs = marked_runs(counts)
    if len(runs) < len(marked_runs(roles == "assistant")):
        raise Problem(UNMARKED)
    if not answers.all():
        if len(runs) != len(answers):
            raise Problem(UNMARKED)
        for start, end in runs[~answers].tolist():
            counts[start:end] = False
    for start, end in runs.tolist():
        after = (ids[start:end] == tokenizer.eos_token_id)[::-1].argmax()
        counts[end - after : end] = False  # the line end after the end of a turn
    counts[0] = False  # nothing comes before it
    tokens = ids.astype(DTYPE) | COUNTS * counts
    tokens[0] |= STARTS
    return tokens


def marked_runs(counts: np.ndarray) -> np.ndarray:
    """Returns the first position of each run of True, and the one after its last, (runs, 2)."""
    return np.flatnonzero(np.diff(counts, prepend=False, append=False)).reshape(-1, 2)


def validation_mask(keys: np.ndarray) -> np.ndarray:
    """Returns which conversations are for validation, (n,) bool; `keys`: (n,) uint64 hashes.

    One in `HELD_OUT` of the different conversations, by the hash. If that is not a `fitting_share`,
    the 20th part with the lowest hashes, at least one.
    """
    keys, inverse = np.unique(keys, return_inverse=True)
    chosen = keys % HELD_OUT == 0
    if not fitting_share(chosen.sum(), len(keys)):
        chosen = np.arange(len(keys)) < max(1, round(len(keys) / HELD_OUT))
    return chosen[inverse]


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items of `lengths`, (n,) integers up to `capacity`, into windows of that capacity.

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


def summary(manifest: dict) -> list[str]:
    """Returns lines that describe a manifest of conversations: each split, and what is left out."""
    lines = []
    length = manifest["sequence_length"]
    kind = "pair" if manifest.get("pairs") else "conversation"
    for split, entry in manifest["splits"].items():
        tokens = entry["tokens"] - entry["padding"]
        lines.append(
            f"{split}: {plural(entry['documents'], kind)}, {tokens:,} tokens, "
            f"{entry['counted'] / tokens:.0%} count in the loss, in "
            f"{plural(entry['tokens'] // length, 'window')} of {length:,} "
            f"({tokens / entry['tokens']:.1%} full)"
        )
    if not manifest.get("packed", True):
        lines.append("each window has one conversation: the model does not keep several apart")
    return lines + left_out(manifest["left_out"])


def left_out(problems: dict[str, list]) -> list[str]:
    """Returns a line for each reason why rows are left out or changed, with the first row."""
    lines = []
    for reason, (count, first) in problems.items():
        action = "kept" if reason == CUT else "left out"
        lines.append(f"{action}: {plural(count, 'row')} {reason}, the first: {first}")
    return lines


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
