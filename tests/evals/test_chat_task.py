"""Answers through the chat template: what counts as right, groups, processes."""

import json

import pytest
import torch
from accelerate import Accelerator
from conftest import reset_accelerate

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.evals.chat import ChatAnswers
from gpt2_accel.evals.items import Item
from gpt2_accel.generation.sampling import Completion, user_turn
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import load_tokenizer

SHAPE = GPTConfig(259, n_positions=128, n_layer=1, n_head=1, n_embd=8)


def build_chat(items, tokenizer):
    return ChatAnswers([Item(f"item {n}", item) for n, item in enumerate(items)], tokenizer, SHAPE)


@pytest.fixture
def tokenizer(chat_base):
    return chat_tokenizer(chat_base)


def test_shares_are_over_all_items_and_groups(tokenizer, monkeypatch):
    texts = {"a": " yes\n", "b": "Yes", "c": "yes", "d": "yes"}

    def answered(model, tokenizer, prompts, sampling):
        asked = [prompt[-1]["content"][0] for prompt in prompts]
        ends = {"a": "end_of_text", "b": "length"}
        return [Completion([], texts[a], ended=ends.get(a, "end_of_text")) for a in asked]

    monkeypatch.setattr("gpt2_accel.evals.chat.complete", answered)
    monkeypatch.setattr("gpt2_accel.evals.chat.TOGETHER", 2)
    groups = {"a": "x", "b": "x", "c": "y", "d": ""}
    items = [
        {"prompt": name * (5 - i), "answer": "yes"} | ({"group": group} if group else {})
        for i, (name, group) in enumerate(groups.items())
    ]
    reset_accelerate()
    task = build_chat(items, tokenizer)
    found = task(Accelerator(), GPT(SHAPE))
    assert found["chat/exact_match"] == 0.75 and found["chat/stop_rate"] == 0.75
    assert found["chat/exact_match_x"] == 0.5 and found["chat/exact_match_y"] == 1
    assert found["chat/exact_match_x_stderr"] == pytest.approx(0.5)
    assert "chat/exact_match_y_stderr" not in found
    assert task(Accelerator(), GPT(SHAPE), lambda: True) == {}


def test_a_model_that_says_nothing_else(tokenizer):
    """A head that always prefers the end of a turn: answers are empty, and end."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1)
        model.wte.weight[258] = 1
    reset_accelerate()
    found = build_chat([{"prompt": "Why?", "answer": ""}], tokenizer)(Accelerator(), model)
    assert found == {"chat/exact_match": 1.0, "chat/stop_rate": 1.0}


def test_bad_items(tokenizer, chat_base):
    for item, message in [
        ({"text": "x"}, "item 0 has no field 'prompt'"),
        ({"prompt": "x"}, "item 0 has no field 'answer'"),
        ({"prompt": 3, "answer": "x"}, "has prompt = 3"),
        ({"prompt": " ", "answer": "x"}, "the message is empty"),
        ({"prompt": [], "answer": "x"}, "item 0: "),
        ({"prompt": "a" * 200, "answer": "x"}, "and the model reads 128: remove it"),
        ({"prompt": "a", "answer": "x", "group": 3}, "has group = 3: expected str"),
        (
            {"prompt": [{"role": "tool", "content": "a"}], "answer": "x"},
            "ends with a message of the user",
        ),
        (
            {"prompt": [{"role": "tool", "content": "a"}, *user_turn("b")], "answer": "x"},
            "a message has the role 'tool'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            build_chat([item], tokenizer)
    items = [{"prompt": "x", "answer": "y"}]
    with pytest.raises(ValueError, match="has no chat template"):
        build_chat(items, load_tokenizer(chat_base))
    messages = [*user_turn("a"), {"role": "assistant", "content": "b"}, *user_turn("c")]
    (question,) = build_chat([{"prompt": messages, "answer": "x"}], tokenizer).questions
    assert json.dumps(question.prompt) == json.dumps(messages)
