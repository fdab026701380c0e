"""Generation: tokens equal to transformers', the end of a text, the number of compilations."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.generation import kv_cache
from gpt2_accel.generation.sampling import (
    Sampling,
    complete,
    load,
    stream,
    tokens,
)
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import byte_tokenizer, char_tokenizer

RAGGED = [[1, 2, 3], [200, 100, 7, 9, 12, 40, 41], [5]]


@pytest.fixture(scope="module")
def model():
    """A random model with weights so large that its choices vary."""
    torch.manual_seed(3)
    model = GPT(
        GPTConfig(vocab_size=257, n_positions=48, n_layer=2, n_head=2, n_embd=32, dropout=0.1)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model


@pytest.fixture(scope="module")
def hf(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    save_pretrained(model, path)
    return GPT2LMHeadModel.from_pretrained(path)


def ids(model, prompts, max_new_tokens, compile=False, **sampling):
    """Returns the new tokens of each row; greedy by default."""
    sampling = Sampling(max_new_tokens, **{"temperature": 0, **sampling})
    steps = tokens(model, prompts, sampling, compile=compile)
    return [list(row) for row in zip(*steps, strict=True)]


def hf_inputs(prompts):
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": padded, "attention_mask": mask}


def hf_ids(hf, prompts, max_new_tokens):
    inputs = hf_inputs(prompts)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    rows = hf.generate(**inputs, max_new_tokens=max_new_tokens, **options)
    return rows[:, inputs["input_ids"].shape[1] :].tolist()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=30), min_size=1, max_size=5),
    st.integers(1, 18),
)
@example([[5]], 40)
@example([[1, 2, 3], [200, 100, 7]], 40)
@example(RAGGED, 40)
def test_greedy_tokens_equal_transformers(model, hf, prompts, length):
    assert ids(model, prompts, length) == hf_ids(hf, prompts, length)


def test_greedy_tokens_in_bf16_are_likeliest_in_transformers(model, hf):
    half, theirs = GPT(model.config), GPT2LMHeadModel(hf.config)
    half.load_state_dict(model.state_dict())
    theirs.load_state_dict(hf.state_dict())
    half, theirs = half.bfloat16(), theirs.bfloat16().eval()
    rows = [prompt + new for prompt, new in zip(RAGGED, ids(half, RAGGED, 30), strict=True)]
    with torch.no_grad():
        for prompt, row in zip(RAGGED, rows, strict=True):
            logits = theirs(torch.tensor([row])).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(row[len(prompt) :])[:, None])[:, 0]
            # Logits may tie in bf16's 8 bits, and the kernels round differently.
            assert (chosen >= logits.amax(1) - 0.05 * logits.abs().amax(1)).all()


def test_compiled_forward_gives_equal_tokens_at_every_length(model, monkeypatch):
    compiled = torch.compile(kv_cache.next_logits, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(kv_cache, "compiled", lambda: compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for prompts in ([[7]], [[7] * 9], RAGGED, [[4] * 20] * 3):
        for length in (2, 55):
            assert ids(model, prompts, length, compile=True) == ids(model, prompts, length)
    # One row, several rows of one length, several rows with padding.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_forward_compiled_by_inductor_gives_equal_tokens():
    model = GPT(GPTConfig(vocab_size=257, n_positions=48, n_layer=1, n_head=2, n_embd=32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    assert ids(model, [[7] * 9], 60, compile=True) == ids(model, [[7] * 9], 60)


def test_samples_depend_on_their_seed_only(model):
    def rows(prompts, **sampling):
        return ids(model, prompts, 20, temperature=1, top_k=0, **sampling)

    state = torch.get_rng_state()
    first, second, third = rows([[5]], seed=1, num_samples=3)
    assert first != second != third
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    # Neither the number of samples nor the other prompts change a sample.
    assert rows([[5]], seed=2) == [second]
    assert rows([[9, 9, 9, 9], [5]], seed=1, num_samples=2)[2:] == [first, second]


def test_text_beyond_n_positions_drops_its_older_half(model):
    model.eval()
    row = list(RAGGED[1])
    with torch.no_grad():
        window = list(row)
        for _ in range(150):
            row.append(model(torch.tensor([window]))[0, -1].argmax().item())
            window.append(row[-1])
            window = window[-24:] if len(window) > 48 else window
    model.train()
    assert ids(model, RAGGED, 150)[1] == row[len(RAGGED[1]) :]
    # Only the last n_positions tokens of a longer prompt are used.
    assert ids(model, [row[:100]], 9) == ids(model, [row[52:100]], 9)


def scripted(monkeypatch, text, prompts=1):
    """Makes `tokens` yield `text`, byte by byte, for each prompt; "|" is the end of the text."""
    data = [256 if part == ord("|") else part for part in text.encode()]

    def written(model, prompt_ids, sampling, **_):
        for byte in data[: sampling.max_new_tokens]:
            yield [byte] * len(prompt_ids)

    monkeypatch.setattr("gpt2_accel.generation.sampling.tokens", written)
    return lambda **sampling: [
        [(sample.text, sample.ended) for sample in samples]
        for samples in stream(None, byte_tokenizer(), ["p"] * prompts, Sampling(**sampling))
    ]


def test_text_ends_at_end_of_text_stop_string_or_length(monkeypatch):
    write = scripted(monkeypatch, "one\ntwo|three")
    assert write()[-1] == [("one\ntwo", "end_of_text")]
    assert write(stop=["tw", "e\nt"])[-1] == [("on", "stop")]
    assert write(max_new_tokens=3)[-1] == [("one", "length")]


def test_stream_holds_back_partial_characters_and_stop_strings(monkeypatch):
    write = scripted(monkeypatch, "a€ STOR STOP b", prompts=2)
    texts = [row[0][0] for row in write(stop=[" STOP", "never"])]
    assert texts[:6] == ["a", "a", "a", "a€", "a€", "a€"]
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert texts[-1] == "a€ STOR" and not any("\ufffd" in text for text in texts)
    assert write(max_new_tokens=2)[-1] == [("a\ufffd", "length")] * 2


def test_empty_prompt_needs_an_end_of_text_token(model):
    sampling = Sampling(5, num_samples=2)
    assert len(complete(model, byte_tokenizer(), [""], sampling)) == 2
    assert complete(model, byte_tokenizer(), [], sampling) == []
    with pytest.raises(ValueError, match="give a prompt"):
        complete(model, char_tokenizer("abc"), [""], sampling)
    with pytest.raises(ValueError, match="no tokens"):
        ids(model, [[1], []], 1)


def test_load_refuses_a_missing_or_larger_tokenizer(tmp_path):
    save_pretrained(GPT(GPTConfig(257, 8, 1, 1, 8)), tmp_path / "none")
    with pytest.raises(
        FileNotFoundError, match="none holds no tokenizer: put the files of the one"
    ):
        load(str(tmp_path / "none"))
    shape = Qwen3Config(257, 8, 1, 2, 1, 8, 16, 16)
    save_pretrained(
        shape.build(), tmp_path / "qwen3"
    )  # transformers makes one of <|endoftext|> only
    with pytest.raises(FileNotFoundError, match="qwen3 holds no tokenizer: put the files of the"):
        load(str(tmp_path / "qwen3"))
    save_pretrained(GPT(GPTConfig(100, 8, 1, 1, 8)), tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="has a tokenizer of 257 tokens, but a vocabulary of 100"):
        load(str(tmp_path / "small"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_refused(value, temperature):
    model = GPT(GPTConfig(vocab_size=257, n_positions=8, n_layer=1, n_head=1, n_embd=8))
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight[0, 0] = value
    sampling = Sampling(3, temperature=temperature)
    with pytest.raises(ValueError, match="not finite"):
        complete(model, byte_tokenizer(), ["ab"], sampling)
