"""Conversations: reads the forms in which data sets hold them, applies the chat template, packs them into windows.

| form                       | fields of a row                                                                    |
|----------------------------|------------------------------------------------------------------------------------|
| messages                   | `messages`: a list of `role` and `content`, or of texts in turns                   |
| ShareGPT                   | `conversations`: a list of `from` (human, gpt, system) and `value`                 |
| prompt and completion      | `prompt`, `completion`: texts or lists of messages; the completion counts          |
| Alpaca, Dolly              | `instruction`, `output` or `response`, optionally `input` or `context`             |

A row with several forms is read by the first. `system` or `system_prompt` beside it is the system's message. The tokens that the template marks as the assistant's count in the loss.
A conversation is never divided: windows are padded. Packing is best fit over ordered lengths (best-fit decreasing, Ding et
al., 2024, arXiv:2404.10830), computed over the whole split by one process, so the bytes do not depend on the workers.
"""

import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from gpt2_accel.data.assembly import manifest_head
from gpt2_accel.data.documents import (
    VAL_SHARE,
    ByHash,
    HeldOut,
    LowestHashes,
    name_digest,
    piece_size,
    split_of,
)
from gpt2_accel.data.plan import SHARD_TOKENS, Plan, work_folder
from gpt2_accel.data.prepare import run_plan
from gpt2_accel.data.shards import (
    COUNTS,
    OPEN_SHARDS,
    PACKED_VERSION,
    STARTS,
    TOKEN_ID,
    Shard,
    ShardWriter,
    template_digest,
    token_dtype,
)
from gpt2_accel.data.sources import (
    FEWEST,
    MOST,
    ROW_SUFFIXES,
    SMALL,
    JsonArrayPiece,
    Row,
    RowPiece,
    json_pieces,
    parquet_pieces,
)
from gpt2_accel.data.tokenizing import Report, clean, record_path, tokenize, tokens_path
from gpt2_accel.files import atomic_file, remove, sync, write_file
from gpt2_accel.progress import progress
from gpt2_accel.tokenizer import conversation_tokens, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why a conversation is left out, but for "cut".
PROBLEMS = {
    "no_answer": "without a message of the assistant that counts, or with none before the cut",
    "role": "with a role other than system, user (human) and assistant (gpt)",
    "empty": "without messages, or with one without text",
    "not_text": "with a message that is no text",
    "unsupported": "with tools, tool calls, reasoning or a history, which are not supported",
    "special_token": "with a special token of the tokenizer in a message, which would end a turn",
    "refused": "that the chat template or the tokenizer refuses",
    "too_long": "of more tokens than a window, whose beginning --cut keeps",
    "cut": "cut to the length of a window",
}
ROLES = {role: role for role in ("system", "user", "assistant")} | {
    "human": "user",
    "gpt": "assistant",
}
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
COUNTED = 2**26  # bytes of a data set whose rows are counted before
SUFFIXES = (".json", *ROW_SUFFIXES)


class Conversation(NamedTuple):
    """A row of a data set in its split; `place`, as `str`, names it in messages."""

    split: str
    row: Any
    place: object


@dataclass(frozen=True)
class ConversationPiece:
    """The conversations in the rows of a piece.

    `template`, the SHA-256 of the chat template, `sequence_length` and `cut` determine their tokens. `model` is the one that
    the data is for.
    """

    rows: RowPiece
    is_held_out: HeldOut
    template: str
    sequence_length: int
    cut: bool
    model: str

    @property
    def size(self) -> int:
        return self.rows.size

    def documents(self) -> Iterator[Conversation]:
        for name, row, place in self.rows.rows():
            yield Conversation(split_of(self.is_held_out(name)), row, place)


def prepare_conversations(
    rows: Sequence[RowPiece],
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
    shard_tokens: int = SHARD_TOKENS,
) -> dict:
    """Writes the conversations in `rows` into `data_dir`, in windows of `sequence_length` tokens; returns the manifest.

    `tokenizer` has a chat template that marks the assistant's tokens, and a `pad_token`, as `hf/chat_template.py` makes it.
    A conversation that is longer than a window is left out; with `cut` its beginning is kept. `source`, `model` (a
    directory relative to `data_dir`), `revision` and `command` are recorded. Raises the errors of `read_messages` and `run_plan`.
    """
    data_dir, template = Path(data_dir), template_digest(tokenizer)
    if Path(model).is_dir():
        model = os.path.relpath(model, data_dir)
    writer = ConversationWriter(work_folder(data_dir), tokenizer, sequence_length, cut)
    rule = rule_for(rows, writer)
    plan = Plan(
        [ConversationPiece(piece, rule, template, sequence_length, cut, model) for piece in rows],
        tokenizer,
        data_dir,
        source,
        revision,
        command,
        shard_tokens,
    )
    return run_plan(
        plan,
        workers,
        partial(tokenize, writer=writer),
        partial(pack, sequence_length=sequence_length, model=model),
    )


class Problem(Exception):
    """A conversation cannot be trained on; its message is one of `PROBLEMS`."""


# Reading a row


def read_messages(row: Any, place: object) -> tuple[list[dict[str, str]], set[int]]:
    """Returns the messages of a row, each with `role` and `content`, and the numbers of those that do not count.

    What the assistant said in a prompt does not count, nor does a message with a `weight` of 0. System messages without
    text are dropped. Raises `ValueError` for a row in none of the forms, `Problem` for a conversation that cannot be
    trained on.
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
    if isinstance(system, str) and not (found and is_system(found[0])):
        found, given = [{"role": "system", "content": system}, *found], given + 1
    messages, silent = [], set()
    for number, message in enumerate(found):
        if (read := message_of(message)) is not None:
            if number < given or message.get("weight") == 0:
                silent.add(len(messages))
            messages.append(read)
    return messages, silent


def raw_messages(fields: dict, place: object) -> tuple[list, int]:
    """Returns the messages in the fields of a row as they are, and how many of them are a prompt."""
    answer = fields.get("output", fields.get("response"))
    if "messages" in fields or "conversations" in fields:
        found = fields.get("messages", fields.get("conversations"))
        if not isinstance(found, list):
            raise Problem("not_text")
        if found and all(isinstance(message, str) for message in found):  # as in LIMA
            roles = ("user", "assistant") * len(found)
            found = [
                {"role": role, "content": text} for role, text in zip(roles, found, strict=False)
            ]
        return found, 0
    if "prompt" in fields and "completion" in fields:
        given = as_messages(fields["prompt"], "user")
        return given + as_messages(fields["completion"], "assistant"), len(given)
    if "instruction" in fields and answer is not None:
        parts = [fields["instruction"], fields.get("input") or fields.get("context") or ""]
        if not all(isinstance(part, str) for part in parts):
            raise Problem("not_text")
        asked = "\n\n".join(part for part in parts if part.strip())
        return as_messages(asked, "user") + as_messages(answer, "assistant"), 0
    raise ValueError(
        f"{place}, has the fields {', '.join(map(str, fields)) or 'none'}, but a conversation has {'; or '.join(FORMS)}: "
        "rename them"
    )


def as_messages(value: Any, role: str) -> list:
    """Returns a list of messages unchanged; a text becomes one message of `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def is_system(message: Any) -> bool:
    """Whether a message is one of the system."""
    return isinstance(message, dict) and message.get("role", message.get("from")) == "system"


def message_of(message: Any) -> dict[str, str] | None:
    """Returns a message with one of `ROLES`, None for a system message without text."""
    if not isinstance(message, dict):
        raise Problem("role")
    if any(message.get(name) for name in UNSUPPORTED):
        raise Problem("unsupported")
    role = ROLES.get(message.get("role", message.get("from")))
    content = message.get("content", message.get("value"))
    if role is None:
        raise Problem("role")
    if content is not None and not isinstance(content, str):
        raise Problem("not_text")
    if not (content or "").strip():
        if role == "system":
            return None
        raise Problem("empty")
    return {"role": role, "content": content}


class ConversationWriter:
    """Tokenizes the conversations of pieces into their files, as uint32 with `STARTS` and `COUNTS`.

    The files are written atomically, the record last. The record's `counts` and `first` have the number and the first
    place of each of `PROBLEMS`.
    """

    dtype = token_dtype(2**32)
    keeps_pieces = True

    def __init__(
        self, work: Path, tokenizer: "PreTrainedTokenizerBase", sequence_length: int, cut: bool
    ):
        self.work, self.tokenizer = work, tokenizer
        self.sequence_length, self.cut = sequence_length, cut
        self.specials = re.compile("|".join(map(re.escape, special_tokens(tokenizer))))

    def write(self, number: int, conversations: Iterable[Conversation], progress: Report) -> None:
        """Tokenizes piece `number`; leaves no partial files after an error."""
        splits: dict[str, Counter] = {}
        counts, first = Counter(dict.fromkeys(PROBLEMS, 0)), {}
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for split, row, place in conversations:
                size = len(json.dumps(row, default=str))
                try:
                    tokens, problem = self.encode(row, place)
                except Problem as error:
                    tokens, problem = None, str(error)
                if problem:
                    counts[problem] += 1
                    if problem not in first:
                        first[problem] = str(place)  # may read the file
                if tokens is None:
                    progress(0, 0, size)
                    continue
                if split not in files:
                    path = tokens_path(self.work, number, split)
                    files[split] = stack.enter_context(atomic_file(path))
                    splits[split] = Counter(tokens=0, documents=0)
                files[split].write(tokens.tobytes())
                splits[split].update(tokens=len(tokens), documents=1)
                progress(1, len(tokens), size)
        record = {"splits": splits, "counts": counts, "first": first}
        write_file(record_path(self.work, number), json.dumps(record))

    def encode(self, row: Any, place: object) -> tuple[np.ndarray, str | None]:
        """Returns the tokens of a row with their bits, (n,) uint32, and "cut" if they were cut.

        Raises `Problem`, and the errors of `read_messages`.
        """
        messages, silent = read_messages(row, place)
        messages = [{**message, "content": clean(message["content"])[0]} for message in messages]
        if not messages:
            raise Problem("empty")
        if all(m["role"] != "assistant" or i in silent for i, m in enumerate(messages)):
            raise Problem("no_answer")
        if any(self.specials.search(message["content"]) for message in messages):
            raise Problem("special_token")
        try:
            ids, counts = conversation_tokens(self.tokenizer, messages)
            for number in silent:
                if messages[number]["role"] == "assistant":
                    before, after = (
                        len(conversation_tokens(self.tokenizer, messages[:end])[0]) if end else 0
                        for end in (number, number + 1)
                    )
                    counts[before:after] = False
        except Exception as error:  # of the template's author, or of the tokenizer
            raise Problem("refused") from error
        too_long = len(ids) > self.sequence_length
        if too_long and not self.cut:
            raise Problem("too_long")
        tokens = ids[: self.sequence_length].astype(self.dtype)
        tokens[counts[: len(tokens)]] |= COUNTS
        tokens[0] = tokens[0] & TOKEN_ID | STARTS  # nothing comes before it
        if not (tokens & COUNTS).any():
            raise Problem("no_answer")
        return tokens, "cut" if too_long else None

    def takes(self, row: Row) -> bool:
        """Whether the conversation in a row can be trained on."""
        try:
            return len(self.encode(row.value, row.place)[0]) > 0
        except Problem:
            return False

    def tokens_per_byte(self, conversation: Conversation) -> float:
        """Returns the tokens per byte of a row as JSON, 1 if it cannot be trained on."""
        try:
            tokens, _ = self.encode(conversation.row, conversation.place)
        except Problem:
            return 1.0
        return len(tokens) / len(json.dumps(conversation.row, default=str))


# The pieces of a data set


def file_rows(source: Path) -> list[RowPiece]:
    """Splits a file, or the files below a folder, into pieces of rows.

    Raises `FileNotFoundError` if a folder has none of `SUFFIXES`, `ValueError` for a file of another format.
    """
    files = [source] if source.is_file() else visible_files(source)
    if not files or not files[0].name.endswith(SUFFIXES):
        raise FileNotFoundError(
            f"{source} holds no conversations: give a file that ends in {', '.join(SUFFIXES)}, or a folder of them"
        )
    size = piece_size(sum(path.stat().st_size for path in files))
    pieces: list[RowPiece] = []
    for path in files:
        name = path.name if path == source else path.relative_to(source).as_posix()
        if path.suffix == ".parquet":
            pieces += parquet_pieces(str(path), "", f"{name}:", ByHash(), size)
        elif path.suffix == ".json" and begins_with_a_bracket(path):
            info = path.stat()
            array = JsonArrayPiece(str(path), "", name, ByHash(), info.st_mtime_ns, info.st_size)
            pieces.append(array)
        else:
            pieces += json_pieces(path, "", name, ByHash(), size)
    return pieces


def visible_files(folder: Path) -> list[Path]:
    """Returns the sorted files below a folder that end in one of `SUFFIXES`; names the first of the others. Hidden files
    are none of them."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    taken = [
        name for name in shown if name.name.endswith(SUFFIXES) and name.name != "dataset_infos.json"
    ]
    if others := sorted(set(shown) - set(taken)):
        what = plural(len(others), "file")
        print(f"{folder}: {what} of another kind left out, the first: {others[0]}", file=sys.stderr)
    return [folder / name for name in taken]


def begins_with_a_bracket(path: Path) -> bool:
    """Whether a JSON file holds an array, and not an object per line."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(4096).lstrip()[:1] == "["


def rule_for(pieces: Sequence[RowPiece], writer: ConversationWriter) -> HeldOut:
    """Returns the rule that holds rows out for validation: one in 20 by hash, if that suits the number of conversations.

    Of a data set of at most `COUNTED` bytes the 20th part with the lowest hashes, one at least, is held out instead. Of a
    small one, `writer` leaves out those that cannot be trained on before.
    """
    size = sum(piece.size for piece in pieces)
    if not 0 < size <= COUNTED:
        return ByHash()
    rows = (row for piece in pieces for row in piece.rows())
    names = [row.name for row in rows if size > SMALL or writer.takes(row)]
    if FEWEST <= sum(map(ByHash(), names)) / max(1, len(names)) <= MOST:
        return ByHash()
    digests = sorted(map(name_digest, names))
    return LowestHashes(digests[max(1, round(VAL_SHARE * len(digests))) - 1] if digests else "")


# Packing


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items of the given lengths, (n,) integers up to `capacity`, into windows of that capacity.

    Returns the items of each window in ascending order, the windows by their first item.
    """
    windows: list[list[int]] = []
    by_free: list[list[int]] = [[] for _ in range(capacity + 1)]  # windows by their free tokens
    some = 0  # bit n is set if a window has n free tokens
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        if fitting := some >> length:
            free = length + (fitting & -fitting).bit_length() - 1
            window = by_free[free].pop()
            if not by_free[free]:
                some ^= 1 << free
        else:
            free, window = capacity, len(windows)
            windows.append([])
        windows[window].append(item)
        if left := free - length:
            by_free[left].append(window)
            some |= 1 << left
    return sorted(map(sorted, windows))


class PackedSplit:
    """The conversations of a split in the pieces' files, and the windows that they are packed into."""

    def __init__(self, plan: Plan, records: list[dict], split: str, sequence_length: int):
        self.padding = np.uint32(plan.tokenizer.pad_token_id)
        self.sequence_length = sequence_length
        pieces = [i for i, record in enumerate(records) if split in record["splits"]]
        sizes = [records[i]["splits"][split]["tokens"] for i in pieces]
        paths = [tokens_path(plan.work, i, split) for i in pieces]

        @functools.lru_cache(maxsize=OPEN_SHARDS)
        def opened(number: int) -> Shard:
            return Shard(paths[number], ConversationWriter.dtype, sizes[number], 0)

        self.file = opened
        found = []
        for number in range(len(pieces)):
            tokens = opened(number).read(0, sizes[number])
            begins = np.flatnonzero(tokens & STARTS)
            lengths = np.diff(np.append(begins, len(tokens)))
            found.append(np.stack((np.full(len(begins), number), begins, lengths), axis=1))
        self.places = np.concatenate(found)  # (conversations, 3): file, first token, length
        self.windows = best_fit(self.places[:, 2], sequence_length)

    def read(self, window: int) -> np.ndarray:
        """Returns the tokens of a window with their bits, (sequence_length,) uint32."""
        tokens = np.full(self.sequence_length, self.padding, ConversationWriter.dtype)
        end = 0
        for file, start, length in self.places[self.windows[window]].tolist():
            tokens[end : end + length] = self.file(file).read(start, length)
            end += length
        return tokens


def pack(plan: Plan, sequence_length: int, model: str) -> dict:
    """Packs the tokenized conversations into shards of windows; returns the manifest. `model` is recorded there.

    Raises `ValueError` if a split would be empty.
    """
    count = len(plan.pieces)
    records = [json.loads(record_path(plan.work, i).read_text()) for i in range(count)]
    counts, first = Counter(dict.fromkeys(PROBLEMS, 0)), {}
    for record in records:
        counts.update(record["counts"])
        first = record["first"] | first
    for split in plan.splits:
        if not any(split in record["splits"] for record in records):
            remove(plan.work / "pieces")
            found = [f"; {line}" for line in left_out(counts, first)]
            raise ValueError(
                f"{plan.source} holds no conversation for the split {split!r}, and each split needs one{''.join(found)}: "
                "add conversations, or correct those that are left out"
            )
    return {
        **manifest_head(plan, ConversationWriter.dtype, PACKED_VERSION),
        "sequence_length": sequence_length,
        "template": template_digest(plan.tokenizer),
        "model": model,
        "counts": counts,
        "first": first,
        "splits": {
            split: write_split(plan, records, split, sequence_length) for split in plan.splits
        },
    }


def left_out(counts: Mapping[str, int], first: Mapping[str, str]) -> list[str]:
    """Returns a line for each of `PROBLEMS` that conversations have: how many, and the first."""
    return [
        f"{'cut' if name == 'cut' else 'left out'}: {plural(counts[name], 'conversation')} {label}, the first: {first[name]}"
        for name, label in PROBLEMS.items()
        if counts.get(name)
    ]


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def write_split(plan: Plan, records: list[dict], split: str, sequence_length: int) -> dict:
    """Writes the shards of a split and the counted targets of its windows; returns its entry in the manifest."""
    packed = PackedSplit(plan, records, split, sequence_length)
    count, each = len(packed.windows), max(1, plan.shard_tokens // sequence_length)
    shards, targets = [], np.zeros(count, np.int64)
    for window in progress(range(count), f"packing {split}", count):
        if window % each == 0:
            path = plan.work / f"{split}_{window // each:06d}.bin"
            writer = ShardWriter(path, ConversationWriter.dtype, PACKED_VERSION)
            conversations = 0
        tokens = packed.read(window)
        writer.append(tokens)
        targets[window] = np.count_nonzero(tokens & COUNTS)
        conversations += len(packed.windows[window])
        if window % each == each - 1 or window == count - 1:
            shards.append({**writer.close(), "documents": conversations})
            sync(path)
    writer = ShardWriter(plan.work / f"{split}_targets.bin", ConversationWriter.dtype)
    writer.append(targets)
    return {
        "tokens": count * sequence_length,
        "documents": len(packed.places),
        "bytes": None,
        "counted": int(targets.sum()),
        "padding": count * sequence_length - int(packed.places[:, 2].sum()),
        "targets": writer.close(),
        "shards": shards,
    }
