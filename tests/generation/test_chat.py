"""Conversations: the cache between turns, dropped turns, refusals."""

from collections import deque
from functools import partial

import pytest
import torch
from conftest import randomized

from gpt2_accel import GPTConfig
from gpt2_accel.generation import chat
from gpt2_accel.generation.chat import Chat
from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.generation.sampling import Sampling, complete, encode_prompt
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import load_tokenizer

ROTARY = {"n_kv_head": 1, "head_dim": 16, "n_inner": 64}
KINDS = {
    "gpt2": GPTConfig,
    "llama": partial(LlamaConfig, **ROTARY),
    "qwen3": partial(Qwen3Config, **ROTARY),
}
GREEDY = Sampling(max_new_tokens=12, temperature=0)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request):
    config = request.param(259, n_positions=256, n_layer=2, n_head=2, n_embd=32)
    return randomized(config.build())


@pytest.fixture
def tokenizer(chat_base):
    return chat_tokenizer(chat_base)


@torch.no_grad()
def test_tokens_after_a_filled_cache_equal_a_recomputation(model):
    ids = torch.randint(257, (2, 40))
    whole = KVCache(model, ids.tolist(), 64).logits
    for cuts in ((10, 25), (1, 2, 39), (20,)):
        cache = KVCache(model, ids[:, : cuts[0]].tolist(), 47)
        for start, end in zip(cuts, (*cuts[1:], 40), strict=True):
            cache.append(ids[:, start:end])
        torch.testing.assert_close(cache.logits, whole, atol=1e-5, rtol=1e-5)
    cache.append(torch.randint(257, (2, 7)))
    cache.truncate(30)
    cache.append(ids[:, 30:])
    torch.testing.assert_close(cache.logits, whole, atol=1e-5, rtol=1e-5)


def said(*texts):
    """Returns a conversation of a user and an assistant in turns."""
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def last(chat, messages, sampling=GREEDY):
    """Returns the whole answer."""
    return deque(chat.answer(messages, sampling), maxlen=1).pop()


def test_a_turn_computes_its_own_tokens_and_answers_as_without_a_cache(
    model, tokenizer, monkeypatch
):
    computed = []
    append = KVCache.append
    monkeypatch.setattr(
        KVCache, "append", lambda self, ids: computed.append(ids.shape[1]) or append(self, ids)
    )
    chat = Chat(model, tokenizer)
    messages = []
    for question in ("Why?", "How?", "And?"):
        messages += said(question)
        computed.clear()
        answer = last(chat, messages)
        turn = computed[0]
        (alone,) = complete(model, tokenizer, [messages], GREEDY)
        assert (answer.ids, answer.text) == (alone.ids, alone.text)
        tokens = len(tokenizer.encode(question))
        if len(messages) > 1:
            # The template around the question, and the last token of the answer before with its end.
            assert tokens < turn < tokens + 60
        messages += [{"role": "assistant", "content": "Yes, it does."}]
    messages[2]["content"] = "What?"  # an edit
    for kept in (messages[:3], messages[:5], messages[:3]):
        (alone,) = complete(model, tokenizer, [kept], GREEDY)
        assert last(chat, kept).ids == alone.ids
    computed.clear()
    same = last(chat, kept)  # the answer again
    assert computed[0] == 1 and same.ids == alone.ids


def test_a_stopped_answer_leaves_a_cache_that_goes_on(model, tokenizer):
    chat = Chat(model, tokenizer)
    answers = chat.answer(said("Why?"), GREEDY)
    for _ in range(5):
        partly = next(answers)
    answers.close()
    assert len(partly.ids) == 5
    messages = said("Why?", "Because.", "And?")
    (alone,) = complete(model, tokenizer, [messages], GREEDY)
    assert last(chat, messages).ids == alone.ids


def test_a_long_conversation_drops_its_oldest_turns(tokenizer):
    model = randomized(GPTConfig(259, n_positions=200, n_layer=1, n_head=1, n_embd=16).build())
    chat = Chat(model, tokenizer)
    system = [{"role": "system", "content": "Be kind."}]
    texts = [f"number {i} {'a' * 20}" for i in range(9)]
    messages = system + said(*texts)
    answer = last(chat, messages)
    assert chat.dropped > 0 and chat.dropped % 2 == 0
    kept = system + messages[1 + chat.dropped :]
    (alone,) = complete(model, tokenizer, [kept], GREEDY)
    assert answer.ids == alone.ids
    last(chat, system + said("Hi"))
    assert chat.dropped == 0
    near = said("a" * 160)  # the answer ends where the positions do
    answer = last(chat, near, Sampling(max_new_tokens=100, temperature=0))
    assert answer.ended and len(answer.ids) <= 200 - 160


def test_a_conversation_of_many_turns_is_rendered_few_times(tokenizer, monkeypatch):
    rendered = []

    def encode(tokenizer, prompt):
        rendered.append(len(prompt))
        return encode_prompt(tokenizer, prompt)

    monkeypatch.setattr(chat, "encode_prompt", encode)
    system = [{"role": "system", "content": "Be kind."}]
    messages = said(*"ab" * 999, "c")
    kept, ids = chat.fit(tokenizer, system + messages, n_positions=200, room=20)
    assert len(rendered) < 13 and sum(rendered) < 3 * len(messages)
    assert kept[0] == system[0] and kept[1:] == messages[1 - len(kept) :]
    assert len(ids) <= 180 and kept[1]["role"] == "user"
    longer = system + messages[-1 - len(kept) :]
    assert len(encode_prompt(tokenizer, longer)) > 180


def test_refusals(model, tokenizer, chat_base):
    chat = Chat(model, tokenizer)
    for messages, message in [
        (said("Why?", "So."), "ends with a message of the user"),
        (said("a<|im_end|>b"), "holds the special token <|im_end|>"),
        (
            said("a" * 300),
            "the last message has 3.. tokens .* and the model reads 256: write less",
        ),
        (
            [{"role": "system", "content": "a" * 300}, *said("Hi")],
            "3.. tokens with the chat template and the system prompt",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            last(chat, messages)
    with pytest.raises(ValueError, match="has no chat template, so it cannot be talked to"):
        Chat(model, load_tokenizer(chat_base))
    assert last(chat, said("Why?")).ids
