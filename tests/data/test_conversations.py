"""Conversations: forms, problems, packing, windows, the loss over counted targets."""

import itertools
import json
import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import chat_rows, make_text, refused, write_lines
from tables import table

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.data.conversations import (
    CUT,
    NO_ANSWER,
    encode_messages,
    left_out,
    prepare_conversations,
)
from gpt2_accel.data.conversations import UNMARKED as NOT_MARKED
from gpt2_accel.data.loader import EvalLoader, TrainLoader
from gpt2_accel.data.messages import Problem, read_messages
from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.shards import COUNTS, STARTS, TOKEN_ID
from gpt2_accel.data.source import open_data, verify_data
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.hf.chat_template import chat_tokenizer

ROWS = table("data/conversations")
ASKED = ROWS["asked"]


@pytest.mark.parametrize("case", ROWS["forms"], ids=lambda case: case["form"])
def test_each_form_of_a_conversation_is_read(case):
    messages = case.get("messages", ASKED)
    counted = case.get("counted", [True] * len(messages))
    assert read_messages(case["row"], "here") == (messages, counted)


@pytest.mark.parametrize("case", ROWS["left_out"])
def test_unusable_rows_are_left_out(case):
    with pytest.raises(Problem, match=case["words"]):
        read_messages(case["row"], "here")


def answered(**changes):
    """Returns a row whose answer has the given fields."""
    return {"messages": [ASKED[0], ASKED[1] | changes]}


def prepared(chat_base, folder, rows=None, template=None, tokenizer=None, **options):
    """Prepares conversations in a folder; returns the manifest."""
    folder.mkdir(exist_ok=True)
    file = folder / "rows.jsonl"
    if rows or not file.exists():  # an equal file of another time is another source
        write_lines(file, rows or chat_rows(40))
    settings = {"sequence_length": 64, "source": "made up", "model": str(chat_base)} | options
    tokenizer = tokenizer or chat_tokenizer(chat_base)
    tokenizer.chat_template = template or tokenizer.chat_template
    return prepare_conversations([str(file)], tokenizer, folder / "chat", **settings)


def stored(folder, split):
    """Returns the ids of each conversation of a split, without padding, and which ids count."""
    (stream, _), *_ = open_data(folder).split(split)
    padding = open_data(folder).tokenizer.pad_token_id
    rows = []
    for window in stream.read(0, stream.tokens).reshape(-1, stream.sequence_length):
        assert window[0] & STARTS
        for words in np.split(window, np.flatnonzero(window & STARTS)[1:]):
            words = words[: np.flatnonzero(words != padding)[-1] + 1]
            rows.append(((words & TOKEN_ID).tolist(), (words & COUNTS != 0).tolist()))
    return rows


def documents(manifest):
    return {name: entry["documents"] for name, entry in manifest["splits"].items()}


def test_rows_that_are_left_out_are_counted_and_named(chat_base, tmp_path):
    odd = [answered(content="a \ud83d"), answered(content="a" * 80), answered(content="💀")]
    rows = chat_rows(20) + ROWS["reasons"] + odd
    manifest = prepared(chat_base, tmp_path, rows)
    places = [f"{tmp_path / 'rows.jsonl'}, line {21 + i}" for i in range(5)]
    assert list(manifest["left_out"].values()) == [[2, place] for place in places]
    assert sum(documents(manifest).values()) == 21
    last = left_out(manifest["left_out"])[-1]
    assert "2 rows" in last
    assert "raise sequence_length" in last
    assert places[-1] in last


def test_a_file_that_changes_while_it_is_read_is_refused(chat_base, tmp_path, monkeypatch):
    def changing(*row):
        os.utime(tmp_path / "rows.jsonl", (1, 1))
        return encode_messages(*row)

    monkeypatch.setattr("gpt2_accel.data.conversations.encode_messages", changing)
    with refused("rows.jsonl has changed"):
        prepared(chat_base, tmp_path)


# Counts line ends after the end of a turn, and prints a system message at the beginning only.
LINES = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1] }}<|im_end|>"
    "\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = LINES.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [LINES, UNMARKED])
def test_a_line_end_after_a_turn_does_not_count(chat_base, template, tmp_path):
    rows = [{"messages": row["messages"] * 2} for row in chat_rows(20)]
    prepared(chat_base, tmp_path, rows, template, sequence_length=128)
    decode = open_data(tmp_path / "chat").tokenizer.decode
    conversations = stored(tmp_path / "chat", "train") + stored(tmp_path / "chat", "val")
    actual = [decode(list(itertools.compress(*pair))) for pair in conversations]
    expected = [f"{row['messages'][1]['content']}<|im_end|>" * 2 for row in rows]
    assert sorted(actual) == sorted(expected)


@pytest.mark.parametrize("messages", ROWS["unprinted"])
@pytest.mark.parametrize("template", [LINES, UNMARKED])
def test_what_the_template_does_not_print_leaves_the_row_out(
    chat_base, template, messages, tmp_path
):
    rows = [*chat_rows(20), {"messages": [ROWS["system_a"], *ASKED]}, {"messages": messages}]
    manifest = prepared(chat_base, tmp_path, rows, template)
    [(reason, (count, place))] = manifest["left_out"].items()
    assert "leaves out a message" in reason
    assert (count, place) == (1, f"{tmp_path / 'rows.jsonl'}, line 22")


# The questions of held-out conversations by the number of conversations; a hash chooses them.
HELD_OUT = {2: ["When 0?"], 30: ["How 13?"]}


@pytest.mark.parametrize("count", HELD_OUT)
def test_equal_conversations_share_a_split_and_each_split_has_some(chat_base, count, tmp_path):
    """Also conversations that differ in spaces that the template trims, or after the cut."""
    rows = chat_rows(count - 1) + [answered(content="so " * 30)]
    end = answered(content="so " * 30 + "end")
    spaced = json.loads(json.dumps(rows[:-1]))
    for row in spaced:
        for message in row["messages"]:
            message["content"] = f" {message['content']}\n"
    prepared(chat_base, tmp_path, rows + spaced + [end] + rows, cut=True)
    train = [tuple(ids) for ids, _ in stored(tmp_path / "chat", "train")]
    val = [tuple(ids) for ids, _ in stored(tmp_path / "chat", "val")]
    assert len(train) + len(val) == 3 * count
    assert len(set(train)) + len(set(val)) == len(set(train + val)) == count
    decode = open_data(tmp_path / "chat").tokenizer.decode
    asked = [decode(ids).split("\n")[1].removesuffix("<|im_end|>") for ids in set(val)]
    assert sorted(asked) == HELD_OUT[count]


TWO_BLOCKS = """\
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- '<|im_start|>assistant\n' -}}{%- endgeneration -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' -}}
    {%- endif -%}
{%- endfor -%}
"""


def random_row(rng):
    """Returns a row, its messages in any order, and which of them may count; the last answers."""
    roles = rng.choices(("system", "user", "assistant"), k=rng.randint(1, 7)) + ["assistant"]
    weights = rng.choices((0, 1, None), k=len(roles) - 1) + [None]
    messages = []
    for role, weight in zip(roles, weights, strict=True):
        content = f" {role} {rng.random()} é\n"
        messages.append({"role": role, "content": content, "weight": weight})
    if rng.random() < 0.3:
        row = {"prompt": messages[:-1], "completion": messages[-1:]}
        return row, messages, [False] * (len(messages) - 1) + [True]
    return {"messages": messages}, messages, [weight != 0 for weight in weights]


@pytest.mark.parametrize("template", [None, TWO_BLOCKS])
def test_stored_tokens_are_those_of_apply_chat_template(chat_base, template, tmp_path):
    """Marked tokens count, but not those of a prompt or of messages with a weight of 0."""
    rng = random.Random(0)
    cases = [random_row(rng) for _ in range(200)]
    rows = [row for row, _, _ in cases]
    manifest = prepared(chat_base, tmp_path, rows, template, sequence_length=512)
    tokenizer = open_data(tmp_path / "chat").tokenizer
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = []
    refused = 0
    for _, messages, may_count in cases:
        encoded = tokenizer.apply_chat_template(messages, **options)
        ids = encoded["input_ids"]
        counts = list(map(bool, encoded["assistant_masks"]))
        counts[0] = False  # nothing comes before it
        start = 0
        for number, counted in enumerate(may_count, 1):
            end = len(tokenizer.apply_chat_template(messages[:number])["input_ids"])
            if not counted:
                counts[start:end] = [False] * (end - start)
            start = end
        roles = [message["role"] for message in messages]
        silent = ("assistant", False) in zip(roles, may_count, strict=True)
        if template and silent and ("assistant", "assistant") in itertools.pairwise(roles):
            refused += 1  # one run of marked tokens holds two answers
        else:
            expected.append((ids, counts))
    actual = stored(tmp_path / "chat", "train") + stored(tmp_path / "chat", "val")
    assert sorted(actual) == sorted(expected)
    assert len(expected) > 100
    assert manifest["left_out"].get(NOT_MARKED, [0])[0] == refused
    assert bool(refused) == bool(template)


def test_a_long_conversation_is_cut_only_if_asked(chat_base, tmp_path):
    long = answered(content="so " * 50)
    late = {"messages": [{"role": "user", "content": "a" * 80}, ASKED[1]]}
    manifest = prepared(chat_base, tmp_path, chat_rows(20) + [long, late], cut=True)
    # No token of the late answer is left.
    assert {reason: n for reason, (n, _) in manifest["left_out"].items()} == {CUT: 1, NO_ANSWER: 1}
    conversations = stored(tmp_path / "chat", "train") + stored(tmp_path / "chat", "val")
    [ids] = [ids for ids, _ in conversations if len(ids) == 64]
    assert open_data(tmp_path / "chat").tokenizer.decode(ids).endswith("so so so so")


@pytest.mark.parametrize(("longest", "length"), [(90, 128), (300, 256)])
def test_windows_are_as_short_as_the_longest_conversation(chat_base, longest, length, tmp_path):
    rows = chat_rows(20) + [answered(content="a" * longest)]
    manifest = prepared(chat_base, tmp_path, rows, sequence_length=256, shorten=True, cut=True)
    assert manifest["sequence_length"] == length
    assert documents(manifest) == {"train": 20, "val": 1}


# Windows


def test_the_targets_and_the_template_are_covered_by_checksums(chat_base, tmp_path):
    manifest = prepared(chat_base, tmp_path)
    folder = tmp_path / "chat"
    assert manifest["version"] == 2
    assert manifest["dtype"] == "uint32"
    assert verify_data(folder) == 4
    file = folder / "train_targets.bin"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"x")
    with refused("train_targets.bin"):
        verify_data(folder)
    file.write_bytes(good)
    template = folder / "tokenizer/chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    with refused("tokenizer"):
        verify_data(folder)


def loader(folder, **options):
    settings = {"sequence_length": 64, "micro_batch_size": 2, "seed": 7} | options
    return TrainLoader(open_data(folder).split("train"), **settings)


def test_other_settings_and_other_window_lengths_are_refused(chat_base, tmp_path):
    assert prepared(chat_base, tmp_path / "a") == prepared(chat_base, tmp_path / "a")
    with refused("exists already"):
        prepared(chat_base, tmp_path / "a", model=str(tmp_path))
    folder = tmp_path / "a/chat"
    with refused("give --sequence_length 64"):
        loader(folder, sequence_length=32)
    prepared(chat_base, tmp_path / "b", sequence_length=128)
    with refused("b/chat has another sequence_length"):
        write_mixture(tmp_path / "mixed", {str(folder): 1, str(tmp_path / "b/chat"): 1})


# The loss over counted targets


@torch.no_grad()
def update_of(model, folder, world_size, micro_batch_size):
    """Returns the loss of an update of 12 windows, as ranks reduce it."""
    total = 0.0
    for rank in range(world_size):
        part = loader(folder, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for batch in part.update(5, 12):
            loss = model(batch.input_ids, batch.targets, documents=batch.documents)
            total += loss.item() / batch.divisor / world_size
    return total


def test_the_loss_of_conversations_and_text_is_the_mean_over_all_counted_targets(
    accelerator, chat_base, tmp_path
):
    """In training on any number of ranks, and in validation."""
    prepared(chat_base, tmp_path, chat_rows(60))
    text, folder = tmp_path / "text", tmp_path / "mixed"
    texts = [make_text(100, seed) for seed in range(9)]
    prepare({"train": texts, "val": texts[:1]}, chat_tokenizer(chat_base), text, source="made up")
    assert write_mixture(folder, {str(text): 1, str(tmp_path / "chat"): 1})["version"] == 2
    assert open_data(folder).chat
    assert (folder / "tokenizer/chat_template.jinja").exists()
    model = GPT(GPTConfig(259, n_positions=64, n_layer=2, n_head=2, n_embd=32))
    input_ids, targets, documents, *_ = next(loader(folder, micro_batch_size=12).update(5, 12))
    counted = (targets != -100).sum(dim=1)
    assert len(counted.unique()) > 3
    assert (counted == 64).any()
    logits = model(input_ids, documents=documents)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for world_size, size in ((1, 12), (1, 1), (2, 2), (3, 4)):
        loss = update_of(model, folder, world_size, size)
        assert loss == pytest.approx(expected.item(), abs=1e-5)
    val = open_data(folder).split("val")
    evaluated = EvalLoader(val, sequence_length=64, batch_size=2, max_tokens=10**6)
    nats = tokens = 0
    for input_ids, targets, documents, *_ in evaluated:
        logits = model(input_ids, documents=documents).flatten(0, 1)
        nats += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
        tokens += (targets != -100).sum().item()
    found = validation_loss(accelerator, model, loader=evaluated)["val/loss"]
    assert found == pytest.approx(nats / tokens)
