"""Sampling: parity with transformers and with a model without a cache, seeds, the end of a text."""

import itertools
import math

import pytest
import torch
from conftest import randomized, refused
from families import own_shape
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.generation import kv_cache
from gpt2_accel.generation.sampling import Sampling, complete, load, stream, tokens
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import byte_tokenizer

RAGGED = [[1, 2, 3], [200, 100, 7, 9, 12, 40, 41], [5]]
KINDS = {
    "gpt2": own_shape("gpt2", dropout=0.1),
    "without biases": own_shape("gpt2", bias=False, gelu="none"),
    "llama": own_shape("llama"),
    "qwen3": own_shape("qwen3", tied=False),
    "nanochat": own_shape("nanochat"),
}


def build(kind):
    """Returns a random model with weights so large that its choices vary, in training mode."""
    torch.manual_seed(3)
    model = randomized(KINDS[kind].build())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.train()


@pytest.fixture(scope="module", params=KINDS)
def each_model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def model():
    return build("gpt2")


def ids(model, prompts, max_new_tokens, **sampling):
    """Returns the new tokens of each row; greedy by default."""
    options = {"temperature": 0} | sampling
    steps = tokens(model, prompts, Sampling(max_new_tokens, **options))
    return [list(row) for row in zip(*steps, strict=True)]


@torch.no_grad()
def recomputed(model, prompt, max_new_tokens):
    """Returns the likeliest tokens after a prompt, by this package's model, without a cache."""
    row = []
    window = list(prompt)
    model.eval()
    for _ in range(max_new_tokens):
        row.append(model(torch.tensor([window]), logits_to_keep=1).argmax().item())
        window.append(row[-1])
        window = window[-24:] if len(window) > 48 else window
    model.train()
    return row


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=48), min_size=1, max_size=4),
    st.integers(1, 30),
)
@example([[5]], 60)
@example(RAGGED, 110)
def test_greedy_tokens_equal_a_recomputation(each_model, prompts, length):
    """In rows of several lengths, and where a text beyond `n_positions` has lost its older half."""
    expected = [recomputed(each_model, prompt, length) for prompt in prompts]
    assert ids(each_model, prompts, length) == expected


def test_greedy_tokens_equal_those_of_transformers(each_model, tmp_path):
    save_pretrained(each_model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for prompt in RAGGED:
        options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
        expected = theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert ids(each_model, [prompt], 30) == [expected.tolist()]


class Mean(torch.nn.Module):
    """Stands in for attention: the mean of a text up to each token. Ignores the cache."""

    def forward(self, x, mask=None, past=None):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def test_a_block_that_ignores_the_cache_is_sampled_without_one(capsys):
    model = build("gpt2")
    model.h[1].attn = Mean()
    assert ids(model, RAGGED, 60) == [recomputed(model, prompt, 60) for prompt in RAGGED]
    assert "does not put its keys and values into `past`" in capsys.readouterr().err


@pytest.fixture
def traced(monkeypatch):
    """Compiles the step of a single sample; a graph break or a recompilation is an error."""
    torch._dynamo.reset()
    step = torch.compile(kv_cache.next_logits, dynamic=False, fullgraph=True, backend="eager")
    monkeypatch.setattr(kv_cache, "compiled", lambda: step)
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.usefixtures("traced")
def test_a_compiled_step_gives_the_same_tokens(each_model):
    """Of several texts, also beyond `n_positions`: nothing of one is left in the next."""
    for prompt in RAGGED:
        assert ids(each_model, [prompt], 60, compile=True) == ids(each_model, [prompt], 60)


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


def scripted(monkeypatch, text, prompts=1):
    """Makes `tokens` yield `text`, byte by byte, for each prompt; "|" is the end of the text."""
    data = [256 if part == ord("|") else part for part in text.encode()]

    def written(model, prompt_ids, sampling, seeds):
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
    assert texts[-1] == "a€ STOR"
    assert not any("\ufffd" in text for text in texts)
    assert write(max_new_tokens=2)[-1] == [("a\ufffd", "length")] * 2


def test_load_refuses_a_missing_or_larger_tokenizer(tmp_path):
    save_pretrained(Qwen3Config(257, 8, 1, 2, 1, 8, 16, 16).build(), tmp_path)
    with refused("holds no tokenizer"):  # transformers makes one of <|endoftext|> only
        load(str(tmp_path))
    save_pretrained(GPT(GPTConfig(100, 8, 1, 1, 8)), tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with refused("vocabulary of 100, but the tokenizer has 257 tokens"):
        load(str(tmp_path))


@pytest.mark.parametrize(("value", "temperature"), [(math.nan, 0), (math.inf, 1)])
def test_logits_that_are_not_finite_are_refused(value, temperature):
    model = GPT(GPTConfig(vocab_size=257, n_positions=8, n_layer=1, n_head=1, n_embd=8))
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight[0, 0] = value
    sampling = Sampling(3, temperature=temperature)
    with refused("not finite"):
        complete(model, byte_tokenizer(), ["ab"], sampling)
