"""Conversations: rows of a data set become messages, tokens in the chat template, and windows of whole conversations.

| form                       | fields of a row                                                                    |
|----------------------------|------------------------------------------------------------------------------------|
| messages                   | `messages`: a list of `role` and `content`, or of texts in turns                   |
| ShareGPT                   | `conversations`: a list of `from` (human, gpt, system) and `value`                 |
| prompt and completion      | `prompt`, `completion`: texts or lists of messages; the completion counts          |
| Alpaca, Dolly              | `instruction`, `output` or `response`, optionally `input` or `context`             |

A row with several forms is read by the first. `system` or `system_prompt` beside it is the system's message. The tokens
that the template marks as the assistant's count in the loss. Windows are packed by best fit over ordered lengths
(best-fit decreasing, Ding et al., 2024, arXiv:2404.10830) and padded; a conversation is never divided.
"""

import functools
import hashlib
import json
import os
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2_accel.data.prepare import run_parts
from gpt2_accel.data.shards import (
    COUNTS,
    PACKED_VERSION,
    STARTS,
    TOKEN_ID,
    ShardWriter,
    template_digest,
    token_dtype,
)
from gpt2_accel.data.sources import Row, Rows, clean, name_digest
from gpt2_accel.files import atomic_file, first_line
from gpt2_accel.progress import progress
from gpt2_accel.tokenizer import conversation_tokens, fingerprint, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why a conversation is left out.
PROBLEMS = {
    "no_answer": "without a message of the assistant that counts, or with none before the cut",
    "role": "with a role other than system, user (human) and assistant (gpt)",
    "empty": "without messages, or with one without text",
    "not_text": "with a message that is no text",
    "unsupported": "with tools, tool calls, reasoning, a history or a weight other than 0 and 1, which are not supported",
    "special_token": "with a special token of the tokenizer in a message, which would end a turn",
    "refused": "that the chat template or the tokenizer refuses",
    "too_long": "of more tokens than a window, whose beginning --cut keeps",
}
# How a conversation is changed.
CHANGES = {
    "cut": "to the length of a window",
    "replaced": "with bytes or characters that are not Unicode, replaced by U+FFFD",
}
ROLES = {name: name for name in ("system", "user", "assistant")}
ROLES |= {"human": "user", "gpt": "assistant"}
FORMS = (
    "messages",
    "conversations",
    "prompt and completion",
    "instruction and output or response",
)
# Fields of a row or a message that would change a conversation if they are not empty.
UNSUPPORTED = (
    *("tools", "functions", "history", "tool_calls", "function_call"),
    *("reasoning_content", "reasoning", "thinking"),
)
HELD_OUT = 20  # one conversation in 20 is for validation
FEWEST, MOST = 0.01, 0.15  # or the 20th part, if their share is not within these bounds
DTYPE = token_dtype(2**32)


def prepare_conversations(
    rows: Sequence[Rows],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    sequence_length: int,
    source: str,
    model: str,
    cut: bool = False,
    workers: int = 1,
    revision: str | None = None,
    command: str | None = None,
    shard_tokens: int = 100_000_000,
) -> dict:
    """Writes the conversations in `rows` into `data_dir`, in windows of `sequence_length` tokens; returns the manifest.

    `tokenizer` has a chat template that marks the assistant's tokens, and a `pad_token`, as `hf/chat_template.py` makes it.
    A conversation that is longer than a window is left out; with `cut` its beginning is kept. `source`, `model` (a
    directory relative to `data_dir`), `revision` and `command` are recorded. Raises `ValueError` for a row in none of the
    forms and if a split would be empty, and the errors of `run_parts`.
    """
    if Path(model).is_dir():
        model = os.path.relpath(model, data_dir)
    writer = ConversationWriter(tokenizer, sequence_length, cut, model, shard_tokens)
    settings = (sequence_length, cut, model, shard_tokens, template_digest(tokenizer))
    content = [fingerprint(tokenizer), *map(repr, settings), *map(repr, rows)]
    plan = hashlib.sha256("\n".join(content).encode("utf-8", "replace")).hexdigest()
    about = {"source": source, "plan": plan, "revision": revision, "command": command}
    return run_parts(rows, writer, tokenizer, Path(data_dir), workers=workers, **about)


class Problem(Exception):
    """A conversation cannot be trained on; the first argument is one of `PROBLEMS`, the second may be a detail."""


# Reading a row


def read_messages(row: Any, place: object) -> tuple[list[dict[str, str]], list[bool]]:
    """Returns the messages of a row, each with `role` and `content`, and which of them may count in the loss.

    Messages of a prompt do not count, nor do those with a `weight` of 0. System messages without text are dropped. Raises
    `ValueError` for a row in none of the forms, `Problem` for a conversation that cannot be trained on.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}, holds a value of type {type(row).__name__}, not an object: write "
            '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
        )
    fields = {name: value for name, value in row.items() if value is not None}
    if any(fields.get(name) for name in UNSUPPORTED):
        raise Problem("unsupported")
    found, given = raw_messages(fields, place)
    system = fields.get("system", fields.get("system_prompt"))
    if isinstance(system, str) and not (found and role_of(found[0]) == "system"):
        found, given = [{"role": "system", "content": system}, *found], given + 1
    messages, counts = [], []
    for number, message in enumerate(found):
        if (role := role_of(message)) is None:
            raise Problem("role")
        weight = message.get("weight")
        if weight not in (None, 0, 1) or any(message.get(name) for name in UNSUPPORTED):
            raise Problem("unsupported")
        content = text_of(message.get("content") or message.get("value") or "")
        if content.strip():
            messages.append({"role": role, "content": content})
            counts.append(number >= given and weight != 0)
        elif role != "system":
            raise Problem("empty")
    return messages, counts


def raw_messages(fields: dict, place: object) -> tuple[list, int]:
    """Returns the messages in the fields of a row as they are, and how many of them are a prompt."""
    answer = fields.get("output", fields.get("response"))
    if "messages" in fields or "conversations" in fields:
        found = fields.get("messages", fields.get("conversations"))
        if not isinstance(found, list):
            raise Problem("not_text")
        if found and all(isinstance(message, str) for message in found):  # as in LIMA
            roles = ("user", "assistant") * len(found)
            found = [{"role": roles[i], "content": text} for i, text in enumerate(found)]
        return found, 0
    if "prompt" in fields and "completion" in fields:
        given = as_messages(fields["prompt"], "user")
        return given + as_messages(fields["completion"], "assistant"), len(given)
    if "instruction" in fields and answer is not None:
        parts = [fields["instruction"], fields.get("input") or fields.get("context") or ""]
        asked = "\n\n".join(text for text in map(text_of, parts) if text.strip())
        return as_messages(asked, "user") + as_messages(answer, "assistant"), 0
    raise ValueError(
        f"{place}, has the fields {', '.join(map(str, fields)) or 'none'}, but a conversation has {'; or '.join(FORMS)}: "
        "rename them"
    )


def as_messages(value: Any, role: str) -> list:
    """Returns a list of messages unchanged; anything else becomes one message of `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def role_of(message: Any) -> str | None:
    """Returns the role of a message, one of `ROLES`' values, None if it has another."""
    role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    return ROLES.get(role) if isinstance(role, str) else None


def text_of(content: Any) -> str:
    """Returns the text of a message; a list of text parts, `{"type": "text", "text": …}`, is joined."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Problem("not_text")
    return "".join(texts)


def mask_answers(counts: np.ndarray, answers: Sequence[bool]) -> None:
    """Sets `counts`, (n,) bool, to False where an answer that does not count is marked; the k-th run of True is the
    k-th answer. Raises `Problem` if a template marks an answer in several runs, or several answers in one."""
    runs = np.flatnonzero(np.diff(counts, prepend=False, append=False)).reshape(-1, 2)
    if len(runs) != len(answers):
        raise Problem("refused", "the template does not mark each answer by itself")
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
    shard_tokens: int

    @functools.cached_property
    def specials(self) -> re.Pattern:
        return re.compile("|".join(map(re.escape, special_tokens(self.tokenizer))))

    def write(self, folder: Path, number: int, part: Rows) -> dict:
        """Writes a part's conversations into one file, uint32 with `STARTS` and `COUNTS`; returns their record.

        `index` has the length of each and the hash of its messages, `counts` and `first` the number and the first place
        of each of `PROBLEMS` and `CHANGES`.
        """
        counts, first, index = Counter(), {}, []
        with atomic_file(tokens_path(folder, number)) as file:
            for row in part.rows():
                detail = ""
                try:
                    tokens, key, notes = self.encode(row)
                    file.write(tokens.tobytes())
                    index.append((len(tokens), key))
                except Problem as problem:
                    notes, detail = problem.args[:1], "".join(f" ({d})" for d in problem.args[1:])
                for name in notes:
                    counts[name] += 1
                    if name not in first:
                        first[name] = f"{row.place}{detail}"  # may read the file
        return {"index": index, "counts": counts, "first": first}

    def encode(self, row: Row) -> tuple[np.ndarray, int, list[str]]:
        """Returns the tokens of a row with their bits, (n,) uint32, the hash of its messages, and which `CHANGES` it has.

        Raises `Problem`, and the errors of `read_messages`.
        """
        messages, counted = read_messages(row.value, row.place)
        replaced = 0
        for message in messages:
            message["content"], wrong = clean(message["content"])
            replaced += wrong
        answers = [c for c, m in zip(counted, messages, strict=True) if m["role"] == "assistant"]
        if not messages:
            raise Problem("empty")
        if not any(answers):
            raise Problem("no_answer")
        if any(self.specials.search(message["content"]) for message in messages):
            raise Problem("special_token")
        try:
            ids, counts = conversation_tokens(self.tokenizer, messages)
        except Exception as error:  # of the template's author, or of the tokenizer
            raise Problem("refused", first_line(error)) from error
        if not all(answers):
            mask_answers(counts, answers)
        too_long = len(ids) > self.sequence_length
        if too_long and not self.cut:
            raise Problem("too_long")
        tokens = ids[: self.sequence_length].astype(DTYPE)
        tokens[counts[: len(tokens)]] |= COUNTS
        tokens[0] = tokens[0] & TOKEN_ID | STARTS  # nothing comes before it
        if not (tokens & COUNTS).any():
            raise Problem("no_answer")
        key = int(name_digest(json.dumps(messages, sort_keys=True))[:16], 16)
        return tokens, key, ["cut"] * too_long + ["replaced"] * bool(replaced)

    def assemble(self, folder: Path, records: list[dict]) -> dict:
        """Packs the conversations of all parts into shards; returns the manifest's entries.

        Raises `ValueError` if a split would be empty.
        """
        counts, first = Counter(dict.fromkeys(PROBLEMS | CHANGES, 0)), {}
        found = []
        for number, record in enumerate(records):
            counts.update(record["counts"])
            first = record["first"] | first
            length, key = np.array(record["index"], np.uint64).reshape(-1, 2).T
            part = np.full_like(length, number)
            found.append(np.stack((part, np.cumsum(length) - length, length, key), axis=1))
        places = np.concatenate(found)
        is_held_out = held_out(places[:, 3])
        splits = {"train": places[~is_held_out], "val": places[is_held_out]}
        for split, chosen in splits.items():
            if not len(chosen):
                lines = "".join(f"; {line}" for line in left_out(counts, first))
                raise ValueError(
                    f"the data set holds no conversation for the split {split!r}, and each split needs one{lines}: add "
                    "different conversations, or correct those that are left out"
                )
        return {
            "version": PACKED_VERSION,
            "dtype": DTYPE.name,
            "sequence_length": self.sequence_length,
            "template": template_digest(self.tokenizer),
            "model": self.model,
            "counts": counts,
            "first": first,
            "splits": {name: self.pack(folder, name, chosen) for name, chosen in splits.items()},
        }

    def pack(self, folder: Path, split: str, places: np.ndarray) -> dict:
        """Writes the shards of a split and the counted targets of its windows; returns its entry in the manifest.

        `places` are (conversations, 4): the part, the first token in its file, the length, the key.
        """
        size = self.sequence_length
        windows = best_fit(places[:, 2].astype(np.int64), size)
        each = max(1, self.shard_tokens // size)
        shards, targets = [], []
        for begin in range(0, len(windows), each):
            name, group = f"{split}_{begin // each:06d}.bin", windows[begin : begin + each]
            writer = ShardWriter(folder / name, DTYPE, PACKED_VERSION)
            for window in progress(group, f"packing {name}", len(group)):
                tokens, end = np.full(size, self.tokenizer.pad_token_id, DTYPE), 0
                for part, start, length, _ in places[window].tolist():
                    path, offset = tokens_path(folder, part), start * DTYPE.itemsize
                    tokens[end : end + length] = np.fromfile(path, DTYPE, length, offset=offset)
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

    It is one in `HELD_OUT` of the different conversations. If these are less than `FEWEST` or more than `MOST` of them, it
    is the 20th part with the lowest hashes, at least one.
    """
    keys, inverse = np.unique(keys, return_inverse=True)
    chosen = keys % np.uint64(HELD_OUT) == 0
    if not FEWEST <= chosen.sum() / max(1, len(keys)) <= MOST:
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


def left_out(counts: Mapping[str, int], first: Mapping[str, str]) -> list[str]:
    """Returns a line for each of `PROBLEMS` and `CHANGES` that conversations have: how many, and the first."""
    return [
        f"{name if name in CHANGES else 'left out'}: {plural(counts[name], 'conversation')} {label}, the first: {first[name]}"
        for name, label in (PROBLEMS | CHANGES).items()
        if counts.get(name)
    ]


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
