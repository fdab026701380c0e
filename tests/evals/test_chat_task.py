"""Answers through the chat template: what counts as right, groups, processes."""

import json

import pytest
import torch
from accelerate import Accelerator
from conftest import reset_accelerate

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.evals.chat import ChatItem, chat, load_chat
from gpt2_accel.evals.tasks import prepare_task
from gpt2_accel.generation.sampling import Completion, user_turn
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import load_tokenizer

SHAPE = GPTConfig(259, n_positions=128, n_layer=1, n_head=1, n_embd=8)


@pytest.fixture
def tokenizer(chat_base):
    return chat_tokenizer(chat_base)


@pytest.mark.parametrize(
    "answer, text, right",
    [
        ("So.", " So.\n", True),
        ("So.", "so.", False),
        ("So.", "So. Yes.", False),
        ("2 + 2 = <<2+2=4>>4\n#### 4", "It is 2 and 2, so 4.", True),
        ("#### 1,234", "#### 1234", True),
        ("#### -5", "There were 3, now -5", True),
        ("#### 4", "#### 5, not 4", False),
        ("#### 4", "I don't know.", False),
        ("#### 2.50", "2.50 dollars", True),
    ],
)
def test_right_answers(answer, text, right):
    assert ChatItem([], answer).matches(text) == right


def test_shares_are_over_all_items_and_groups(tokenizer, monkeypatch):
    texts = {"a": "yes", "b": "no", "c": "yes", "d": "yes"}

    def answered(model, tokenizer, prompts, sampling):
        asked = [prompt[-1]["content"][0] for prompt in prompts]
        ends = {"a": "end_of_text", "b": "length"}
        return [Completion([], texts[a], ended=ends.get(a, "end_of_text")) for a in asked]

    monkeypatch.setattr("gpt2_accel.evals.chat.complete", answered)
    monkeypatch.setattr("gpt2_accel.evals.chat.TOGETHER", 2)
    groups = {"a": "x", "b": "x", "c": "y", "d": ""}
    items = [
        {"question": name * (5 - i), "answer": "yes"} | ({"group": group} if group else {})
        for i, (name, group) in enumerate(groups.items())
    ]
    reset_accelerate()
    task = prepare_task(tokenizer, SHAPE, "chat", items)
    (run,) = task.evaluations
    found = run(Accelerator(), GPT(SHAPE))
    assert found["chat/exact_match"] == 0.75 and found["chat/stop_rate"] == 0.75
    assert found["chat/exact_match_x"] == 0.5 and found["chat/exact_match_y"] == 1
    assert found["chat/exact_match_x_stderr"] == pytest.approx(0.5)
    assert "chat/exact_match_y_stderr" not in found
    one = load_chat(items[:1], tokenizer, SHAPE)
    assert chat(Accelerator(), GPT(SHAPE), lambda: True, items=one, tokenizer=tokenizer) == {}


def test_a_model_that_says_nothing_else(tokenizer):
    """A head that always prefers the end of a turn: answers are empty, and end."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1)
        model.wte.weight[258] = 1
    items = load_chat([{"prompt": "Why?", "answer": ""}], tokenizer, SHAPE)
    reset_accelerate()
    found = chat(Accelerator(), model, items=items, tokenizer=tokenizer)
    assert found == {"chat/exact_match": 1.0, "chat/stop_rate": 1.0}


def test_bad_items(tokenizer, chat_base):
    for item, message in [
        ({"text": "x"}, "item 0 of chat has no field 'question'"),
        ({"prompt": "x"}, "item 0 of chat has no field 'answer'"),
        ({"prompt": 3, "answer": "x"}, "has prompt = 3"),
        ({"prompt": " ", "answer": "x"}, "the message is empty"),
        ({"prompt": [], "answer": "x"}, "item 0 of chat: "),
        ({"prompt": "a" * 200, "answer": "x"}, "and the model reads 128: remove it"),
        ({"prompt": "a", "answer": "x", "group": "stderr"}, "has the group 'stderr': use letters"),
        ({"prompt": "a", "answer": "x", "group": "a|b"}, "has the group 'a|b': use letters"),
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
            load_chat([item], tokenizer, SHAPE)
    items = [{"prompt": "x", "answer": "y"}]
    with pytest.raises(ValueError, match="has no chat template"):
        load_chat(items, load_tokenizer(chat_base), SHAPE)
    messages = [*user_turn("a"), {"role": "assistant", "content": "b"}, *user_turn("c")]
    (item,) = load_chat([{"prompt": messages, "answer": "x"}], tokenizer, SHAPE)
    assert json.dumps(item.prompt) == json.dumps(messages)
