import pytest
import torch
from transformers import GPT2LMHeadModel

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.generate import complete, generate, sample
from gpt2_accel.tokenizer import byte_tokenizer, char_tokenizer


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=257, n_positions=24, n_layer=2, n_head=2, n_embd=32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model


def test_greedy_text_is_that_of_transformers(model, tmp_path):
    save_pretrained(model, tmp_path)
    hf = GPT2LMHeadModel.from_pretrained(tmp_path)
    prompt = torch.tensor([[1, 2, 3], [200, 100, 7]])
    theirs = hf.generate(
        prompt, max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(generate(model, prompt, 15, temperature=0), theirs)


def test_the_seed_decides_and_the_global_state_is_left_alone(model):
    prompt = torch.tensor([[5]])
    state = torch.get_rng_state()
    first, again, other = (generate(model, prompt, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_text_goes_on_past_the_positions(model):
    assert generate(model, torch.zeros(2, 20, dtype=torch.long), 30).shape == (2, 50)


def test_top_k_and_top_p_keep_only_the_likeliest():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, 4)

    def drawn(**changes):
        options = {"temperature": 1.0, "top_k": None, "top_p": 1.0, **changes}
        ids = sample(logits, generator=torch.Generator().manual_seed(0), **options)
        return torch.bincount(ids.flatten(), minlength=4) / 2000

    torch.testing.assert_close(drawn(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.04, rtol=0)
    torch.testing.assert_close(
        drawn(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.04, rtol=0
    )
    torch.testing.assert_close(
        drawn(top_p=0.6), torch.tensor([0.625, 0.375, 0, 0]), atol=0.04, rtol=0
    )
    assert drawn(top_p=0.4)[0] == drawn(temperature=0)[0] == 1


def test_an_empty_prompt_starts_a_text_where_the_tokenizer_can(model):
    assert len(complete(model, byte_tokenizer(), "", 5, num_samples=2)) == 2
    with pytest.raises(ValueError, match="give a prompt"):
        complete(model, char_tokenizer("abc"), "", 5)


@pytest.mark.parametrize(
    "setting", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}]
)
def test_a_setting_out_of_range_is_named(model, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        generate(model, torch.tensor([[1]]), 1, **setting)
