import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Config

from gpt2_accel.tokenizer import (
    byte_tokenizer,
    char_tokenizer,
    encode,
    fingerprint,
    gpt2_tokenizer,
    tiktoken_gpt2,
    train_bpe,
)

TEXT = "def f(x):\n    return x + 1\n\ndef g(y):\n    return f(y) * 2\n" * 20


def reloaded(tokenizer, folder):
    """What AutoTokenizer makes of the files beside a GPT-2's config."""
    tokenizer.save_pretrained(folder)
    GPT2Config(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None).save_pretrained(
        folder
    )
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "tokenizer",
    [byte_tokenizer(), train_bpe([TEXT], 300), char_tokenizer(TEXT)],
    ids=["bytes", "bpe", "char"],
)
def test_autotokenizer_encodes_and_decodes_alike(tokenizer, tmp_path):
    again = reloaded(tokenizer, tmp_path)
    [ids] = encode(tokenizer, [TEXT])
    assert again(TEXT)["input_ids"] == ids
    assert again.decode(ids) == tokenizer.decode(ids) == TEXT
    assert fingerprint(again) == fingerprint(tokenizer)


@given(st.text())
@settings(deadline=None)
def test_byte_ids_are_the_utf8_bytes(text):
    tokenizer = byte_tokenizer()
    assert encode(tokenizer, [text]) == [list(text.encode())]


@given(st.text())
@settings(deadline=None, max_examples=50)
def test_a_trained_bpe_loses_nothing(text):
    tokenizer = train_bpe([TEXT], 300)
    assert tokenizer.decode(encode(tokenizer, [text])[0]) == text


def test_a_trained_bpe_has_the_size_asked_for_and_its_separator_last():
    tokenizer = train_bpe([TEXT], 270)
    assert len(tokenizer) == 270
    assert tokenizer.eos_token_id == 269
    with pytest.raises(ValueError, match="vocab_size"):
        train_bpe([TEXT], 257)


def test_the_literal_separator_is_text():
    tokenizer = byte_tokenizer()
    assert encode(tokenizer, ["<|endoftext|>"]) == [list(b"<|endoftext|>")]


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match="é"):
        encode(char_tokenizer("abc"), ["abéc"])


@pytest.fixture(scope="module")
def gpt2():
    try:
        return gpt2_tokenizer()
    except OSError as error:
        pytest.skip(f"no copy of GPT-2's vocabulary: {error}")


def test_gpt2_ids_are_tiktokens_saved_too(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    gpt2 = AutoTokenizer.from_pretrained(tmp_path)
    assert len(gpt2) == 50257
    assert gpt2.eos_token_id == 50256

    @given(st.text())
    @settings(deadline=None, max_examples=300)
    def check(text):
        assert encode(gpt2, [text])[0] == tiktoken_gpt2().encode_ordinary(text)

    check()
