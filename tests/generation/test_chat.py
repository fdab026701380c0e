"""Conversations: dropped turns, refusals."""

from collections import deque

import pytest
from conftest import randomized, refused

from gpt2_accel import GPTConfig
from gpt2_accel.generation import chat
from gpt2_accel.generation.sampling import Sampling, complete, encode_prompt
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import load_tokenizer

GREEDY = Sampling(max_new_tokens=12, temperature=0)
SYSTEM = [{"role": "system", "content": "Be kind."}]


def build(n_positions):
    return randomized(GPTConfig(259, n_positions, n_layer=1, n_head=1, n_embd=16).build())


@pytest.fixture
def tokenizer(chat_base):
    return chat_tokenizer(chat_base)


def turns(*texts):
    """Returns a conversation of a user and an assistant in turns."""
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def last(model, tokenizer, messages, sampling=GREEDY):
    """Returns the number of dropped messages and the whole answer."""
    dropped, written = chat.answer(model, tokenizer, messages, sampling)
    return dropped, deque(written, maxlen=1).pop()[0]


def test_a_long_conversation_drops_its_oldest_turns(tokenizer):
    model = build(200)
    messages = SYSTEM + turns(*(f"number {i} {'a' * 20}" for i in range(9)))
    dropped, answer = last(model, tokenizer, messages)
    assert dropped > 0
    assert dropped % 2 == 0
    longer = SYSTEM + messages[dropped - 1 :]  # two messages more do not fit
    assert len(encode_prompt(tokenizer, longer)) + GREEDY.max_new_tokens > 200
    (alone,) = complete(model, tokenizer, [SYSTEM + messages[1 + dropped :]], GREEDY)
    assert answer.ids == alone.ids
    assert last(model, tokenizer, SYSTEM + turns("Hi"))[0] == 0
    # The answer ends where the positions do.
    _, answer = last(model, tokenizer, turns("a" * 160), Sampling(100, temperature=0))
    assert answer.ended
    assert len(answer.ids) <= 200 - 160


def test_unusable_conversations_are_refused(tokenizer, chat_base):
    model = build(256)
    long = "a" * 300
    for messages, message in [
        (turns("Why?", "So."), "ends with a message of the user"),
        (turns("a<|im_end|>b"), "special token <|im_end|>"),
        (turns("a\udcff"), "not UTF-8"),
        (turns(long), "the model reads 256"),
        ([{"role": "system", "content": long}, *turns("Hi")], "system prompt"),
    ]:
        with refused(message):
            chat.answer(model, tokenizer, messages, GREEDY)
    tokenizer.chat_template = "{{ 1 // 0 }}"
    with refused("refuses the conversation"):
        chat.answer(model, tokenizer, turns("Hi"), GREEDY)
    with refused("no chat template"):
        chat.answer(model, load_tokenizer(chat_base), turns("Hi"), GREEDY)
