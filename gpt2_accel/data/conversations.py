"""Conversations: reads the forms in which data sets hold them, applies the chat template, packs them into windows.

| form                       | fields of a row                                                                    |
|----------------------------|------------------------------------------------------------------------------------|
| messages                   | `messages`: a list of `role` and `content`                                         |
| ShareGPT                   | `conversations`: a list of `from` (human, gpt, system) and `value`                 |
| prompt and completion      | `prompt`, `completion`: texts, or lists of messages of which the completion counts |
| Alpaca, Dolly              | `instruction`, `output` or `response`, optionally `input` or `context`             |

A row with several forms is read by the first. The tokens that the template marks as the assistant's count in the loss.
A conversation is never divided: windows are padded. Packing is best fit over ordered lengths (best-fit decreasing, Ding et
al., 2024, arXiv:2404.10830), computed over the whole split by one process, so the bytes do not depend on the workers.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from jinja2 import TemplateError

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
from gpt2_accel.tokenizer import conversation_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Problems of a conversation, which is then left out (but for `cut`): there is no turn of the assistant, or no token of it
# in the part that is kept; a role is not one of `ROLES`; there is no message, or one without text; a content is not a
# text; a content holds a special token, which would end a turn; the chat template refuses it; it is longer than a window;
# it was cut to a window.
PROBLEMS = ("no_answer", "role", "empty", "not_text", "special_token", "refused", "too_long", "cut")
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
SUFFIXES = (".json", *ROW_SUFFIXES)


class Conversation(NamedTuple):
    """A row of a data set in its split; `place`, as `str`, names it in messages."""

    split: str
    row: Any
    place: object


@dataclass(frozen=True)
class ConversationPiece:
    """The conversations in the rows of a piece.

    `template`, the SHA-256 of the chat template, `sequence_length` and `cut` determine their tokens.
    """

    rows: RowPiece
    is_held_out: HeldOut
    template: str
    sequence_length: int
    cut: bool

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
    A conversation that is longer than a window is left out; with `cut` its beginning is kept. `source`, `model`,
    `revision` and `command` are recorded. Raises the errors of `read_messages` and `run_plan`.
    """
    data_dir, template = Path(data_dir), template_digest(tokenizer)
    writer = ConversationWriter(work_folder(data_dir), tokenizer, sequence_length, cut)
    rule = rule_for(rows, writer)
    plan = Plan(
        [ConversationPiece(piece, rule, template, sequence_length, cut) for piece in rows],
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


def read_messages(row: Any, place: object) -> tuple[list[dict[str, str]], int]:
    """Returns the messages of a row, each with `role` and `content`, and how many of the first do not count.

    System messages without text are dropped. Raises `ValueError` for a row in none of the forms, `Problem` for a
    conversation that cannot be trained on.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}, holds a value of type {type(row).__name__}, not an object: write "
            '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
        )
    fields = {name: value for name, value in row.items() if value is not None}
    given: list = []
    answer = fields.get("output", fields.get("response"))
    if "messages" in fields or "conversations" in fields:
        found = fields.get("messages", fields.get("conversations"))
    elif "prompt" in fields and "completion" in fields:
        given = as_messages(fields["prompt"], "user")
        found = given + as_messages(fields["completion"], "assistant")
    elif "instruction" in fields and answer is not None:
        question = [fields["instruction"], fields.get("input", fields.get("context", ""))]
        if not all(isinstance(part, str) for part in question):
            raise Problem("not_text")
        asked = "\n\n".join(part for part in question if part.strip())
        found = as_messages(asked, "user") + as_messages(answer, "assistant")
    else:
        raise ValueError(
            f"{place}, has the fields {', '.join(map(str, row)) or 'none'}, but a conversation has {'; or '.join(FORMS)}: "
            "rename them"
        )
    if not isinstance(found, list):
        raise Problem("not_text")
    # A completion counts, and not what was answered before it.
    rest = [message_of(message) for message in found[len(given) :]]
    first = [message for message in map(message_of, given) if message is not None]
    return first + [message for message in rest if message is not None], len(first)


def as_messages(value: Any, role: str) -> list:
    """Returns a list of messages as it is, and a text as one message of `role`."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def message_of(message: Any) -> dict[str, str] | None:
    """Returns a message with one of `ROLES`, None for a system message without text."""
    if not isinstance(message, dict):
        raise Problem("role")
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
        specials = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.specials = re.compile("|".join(map(re.escape, specials)))

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
        messages, given = read_messages(row, place)
        messages = [{**message, "content": clean(message["content"])[0]} for message in messages]
        if not messages:
            raise Problem("empty")
        if all(message["role"] != "assistant" for message in messages[given:]):
            raise Problem("no_answer")
        if any(self.specials.search(message["content"]) for message in messages):
            raise Problem("special_token")
        try:
            ids, counts = conversation_tokens(self.tokenizer, messages)
            if any(message["role"] == "assistant" for message in messages[:given]):
                counts[: len(conversation_tokens(self.tokenizer, messages[:given])[0])] = False
        except TemplateError as error:
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
    files = [source] if source.is_file() else sorted(source.rglob("*"))
    files = [path for path in files if path.name.endswith(SUFFIXES)]
    if not files:
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


def begins_with_a_bracket(path: Path) -> bool:
    """Whether a JSON file holds an array, and not an object per line."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(4096).lstrip()[:1] == "["


def rule_for(pieces: Sequence[RowPiece], writer: ConversationWriter) -> HeldOut:
    """Returns the rule that holds rows out for validation: one in 20 by hash, if that suits the number of conversations.

    Of a small data set, whose conversations `writer` counts, the 20th part with the lowest hashes, one at least, is held
    out instead.
    """
    if not 0 < sum(piece.size for piece in pieces) <= SMALL:
        return ByHash()
    names = [row.name for piece in pieces for row in piece.rows() if writer.takes(row)]
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
            left_out = "; ".join(
                f"{counts[name]:,} have the problem {name}, the first is {place}"
                for name, place in first.items()
            )
            raise ValueError(
                f"{plan.source} holds no conversation for the split {split!r}"
                f"{' (' + left_out + ')' if left_out else ''}: add conversations"
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
