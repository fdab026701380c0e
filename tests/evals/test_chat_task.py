"""Answers through the chat template: what counts as right, groups, processes."""

import pytest
import torch
from accelerate import Accelerator

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.evals import chat
from gpt2_accel.evals.chat import ChatAnswers
from gpt2_accel.evals.items import Item
from gpt2_accel.generation.sampling import Completion, Sampling
from gpt2_accel.hf.chat_template import chat_tokenizer

SHAPE = GPTConfig(259, n_positions=128, n_layer=1, n_head=1, n_embd=8)


def build_chat(items, tokenizer):
    return ChatAnswers([Item(f"item {n}", item) for n, item in enumerate(items)], tokenizer, SHAPE)


@pytest.fixture
def tokenizer(chat_base):
    return chat_tokenizer(chat_base)


def test_exact_match_is_over_all_items_and_groups_on_all_ranks(accelerator, tokenizer, monkeypatch):
    texts = {"a": " yes\n", "b": "Yes", "c": "yes", "d": "yes", "e": "yes, yes"}

    def answered(model, tokenizer, prompts, *_):
        completions = []
        for prompt in prompts:
            name = prompt[-1]["content"][0]
            ended = "length" if name == "b" else "end_of_text"
            completions.append(Completion([], texts[name], ended=ended))
        return completions

    monkeypatch.setattr(chat, "complete", answered)
    monkeypatch.setattr(chat, "BATCH_SIZE", 2)  # the five items are three batches
    items = [
        {"prompt": "aaaaa", "answer": "yes", "group": "x"},
        {"prompt": "bbbb", "answer": "yes", "group": "x"},
        {"prompt": "ccc", "answer": "yes", "group": "y"},
        {"prompt": "dd", "answer": "yes"},
        {"prompt": "e", "answer": "yes"},
    ]
    task = build_chat(items, tokenizer)
    parts = []
    results = task(accelerator, GPT(SHAPE))
    assert results["chat/exact_match"] == 0.6
    assert results["chat/stop_rate"] == 0.8
    assert results["chat/exact_match_x"] == 0.5
    assert results["chat/exact_match_y"] == 1
    assert results["chat/exact_match_x_stderr"] == pytest.approx(0.5)
    assert "chat/exact_match_y_stderr" not in results

    monkeypatch.setattr(chat, "gather_object", lambda part: parts.extend(part) or parts)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    polls = []
    for rank in range(2):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        again = task(accelerator, GPT(SHAPE), lambda rank=rank: bool(polls.append(rank)))
    assert again == results
    assert len(parts) == 5
    assert polls == [0, 0, 1, 1]  # as often on both, also where the second has no batch


def test_an_answer_depends_on_its_own_seed_only(accelerator, tokenizer, monkeypatch):
    question = chat.read_question(Item("a", {"prompt": "Why?"}), tokenizer)
    model = GPT(SHAPE)
    given = []
    for size in (64, 4):  # one batch, and two
        monkeypatch.setattr(chat, "BATCH_SIZE", size)
        own = (tokenizer, [question] * 3, Sampling(9, 1, 0, num_samples=2), lambda: False)
        found = chat.answers(accelerator, model, *own)
        given.append([tuple(answer.ids) for _, own in found for answer in own])
    assert given[0] == given[1]
    assert len(set(given[0])) == 6


@pytest.mark.parametrize("stop", [1, 4])  # before the batch, and after its third token
def test_a_stop_ends_the_answers_between_tokens(stop, accelerator, tokenizer):
    task = build_chat([{"prompt": "Why?", "answer": "x"}], tokenizer)
    polls = iter(range(1, stop + 1))
    assert task(accelerator, GPT(SHAPE), lambda: next(polls) == stop) == {}


def test_empty_answers_that_end_are_exact(accelerator, tokenizer):
    """A head that always prefers the end of a turn: answers are empty, and end."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1)
        model.wte.weight[258] = 1
    results = build_chat([{"prompt": "Why?", "answer": ""}], tokenizer)(accelerator, model)
    assert results == {"chat/exact_match": 1.0, "chat/stop_rate": 1.0}
