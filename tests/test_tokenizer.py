"""Tokenizers: their ids, what `AutoTokenizer` makes of their files, and what is refused."""

import json

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.prepare import prepare
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import (
    PROBE,
    byte_tokenizer,
    char_tokenizer,
    encode,
    fingerprint,
    load_tokenizer,
    prompt_tokens,
    save_tokenizer,
    special_tokens,
    token_encoder,
    train_bpe,
)

TEXT = "def f(x):\n    return x + 1\n\ndef g(y):\n    return f(y) * 2\n" * 20
BPE = train_bpe([TEXT], 300)


def save_model(tokenizer, folder):
    """Saves a GPT-2 with this tokenizer."""
    model = GPT(GPTConfig(len(tokenizer), n_positions=8, n_layer=1, n_head=1, n_embd=8))
    save_pretrained(model, folder, tokenizer)


def raw_ids(bpe: Tokenizer, text: str) -> list[int]:
    bpe.encode_special_tokens = True
    return bpe.encode(text).ids


@pytest.mark.parametrize(
    "tokenizer",
    [byte_tokenizer(), BPE, char_tokenizer(TEXT), char_tokenizer(PROBE), None],
    ids=["bytes", "bpe", "char", "chars of the probe", "gpt2"],
)
def test_all_ways_to_encode_agree(tokenizer, gpt2, tmp_path):
    tokenizer = tokenizer or gpt2
    text = TEXT if len(tokenizer) == len(set(TEXT)) else PROBE
    [ids] = encode(tokenizer, [text])
    assert tokenizer.decode(ids) == text
    encoder = token_encoder(tokenizer)
    for each in (text, "", "\n\n"):
        assert encoder(each).tolist() == encode(tokenizer, [each])[0]
    save_model(tokenizer, tmp_path)
    for config in (None, Qwen3Config(vocab_size=len(tokenizer))):  # the class depends on it
        if config:
            config.save_pretrained(tmp_path)
            save_tokenizer(tokenizer, tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert again(text, split_special_tokens=True)["input_ids"] == ids
        assert again.decode(ids) == text and fingerprint(again) == fingerprint(tokenizer)
        assert raw_ids(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), text) == ids
        assert encode(load_tokenizer(tmp_path), [text])[0] == ids


@given(st.text())
@settings(deadline=None, max_examples=200)
def test_ids_are_utf8_bytes_and_tiktokens(text):
    assert encode(byte_tokenizer(), [text]) == [list(text.encode())]
    assert token_encoder(byte_tokenizer())(text).tolist() == list(text.encode())
    assert BPE.decode(encode(BPE, [text])[0]) == text


def test_gpt2_ids_are_tiktokens(gpt2):
    assert len(gpt2) == 50257 and gpt2.eos_token_id == 50256
    fast = token_encoder(gpt2)
    assert fast.func.__name__ == "encode_to_numpy"  # of tiktoken

    @given(st.text())
    @settings(deadline=None, max_examples=300)
    def check(text):
        ids = tiktoken.get_encoding("gpt2").encode_ordinary(text)
        assert encode(gpt2, [text])[0] == fast(text).tolist() == ids

    check()


def test_a_trained_bpe_has_the_size_asked_for_and_its_separator_last():
    tokenizer = train_bpe([TEXT], 270)
    assert len(tokenizer) == 270 and tokenizer.eos_token_id == 269
    for size in (257, 10**7):
        with pytest.raises(ValueError, match="vocab_size of a BPE is at least 258"):
            train_bpe([TEXT], size)


def test_characters_are_in_code_point_order():
    tokenizer = char_tokenizer("bca\nb")
    assert encode(tokenizer, ["a\ncb"]) == [[1, 0, 3, 2]]
    for encodes in (lambda text: encode(tokenizer, [text]), token_encoder(tokenizer)):
        with pytest.raises(ValueError, match=r"does not know the characters \['d', 'é'\]"):
            encodes("abécd")


def test_special_tokens_in_a_message_are_no_control_tokens(chat_base):
    tokenizer = chat_tokenizer(chat_base)
    assert special_tokens(tokenizer) == ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    for token in special_tokens(tokenizer):
        with pytest.raises(ValueError, match="the message holds the special token"):
            prompt_tokens(tokenizer, [{"role": "user", "content": f"a{token}b"}])


def byte_level(**options) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def changed(**parts) -> Tokenizer:
    """A byte-level BPE with `<|endoftext|>` and GPT-2's word splitting, but for the given parts."""
    bpe = Tokenizer.from_str(train_bpe([PROBE, TEXT], 400).backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(bpe, name, part)
    return bpe


def write_files(bpe, folder, tokenizer_class="PreTrainedTokenizerFast"):
    """Writes tokenizer.json, tokenizer_config.json and a GPT-2's config.json, as a Hub repository has them."""
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    settings = {"eos_token": "<|endoftext|>", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    GPT2Config(vocab_size=bpe.get_vocab_size()).save_pretrained(folder)


def splitting(*parts) -> dict:
    return {"pre_tokenizer": pre_tokenizers.Sequence([*parts])}


PARTS = {
    "as GPT-2": {},
    "space first": {"pre_tokenizer": byte_level(add_prefix_space=True)},
    "whole words": {"pre_tokenizer": byte_level(use_regex=False)},
    "NFC": {"normalizer": normalizers.NFC()},
    "regex": splitting(
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+(?!\S)|\s*[\r\n]+"), "isolated"),
        byte_level(use_regex=False),
    ),
    "SmolLM2": splitting(pre_tokenizers.Digits(individual_digits=True), byte_level()),
}


@pytest.mark.parametrize("name", [None, "GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("parts", PARTS)
def test_the_token_ids_are_those_of_tokenizer_json(parts, name, tmp_path):
    """`AutoTokenizer` replaces parts of some tokenizers by those of the named class."""
    bpe = changed(**PARTS[parts])
    bpe.add_tokens([AddedToken("it's", lstrip=True), AddedToken("four", single_word=True)])
    write_files(bpe, tmp_path / "model", name)
    ids = raw_ids(bpe, PROBE)
    tokenizer = load_tokenizer(tmp_path / "model")
    prepare({"train": [TEXT]}, tokenizer, tmp_path / "data", source="test")
    tokenizer = load_tokenizer(tmp_path / "data/tokenizer")
    assert encode(tokenizer, [PROBE]) == [ids] == [token_encoder(tokenizer)(PROBE).tolist()]
    assert tokenizer.eos_token == "<|endoftext|>"
    save_model(tokenizer, tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert encode(again, [PROBE]) == [ids]


@pytest.mark.parametrize(
    "parts",
    [{"normalizer": normalizers.Prepend("\u2581")}, {"pre_tokenizer": pre_tokenizers.Metaspace()}],
)
def test_a_tokenizer_of_sentencepieces_kind_is_refused(parts, tmp_path):
    bpe = changed(**parts)
    write_files(bpe, tmp_path / "model")
    with pytest.raises(ValueError, match="model has a tokenizer of SentencePiece's kind"):
        load_tokenizer(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    with pytest.raises(ValueError, match="data/tokenizer has a tokenizer of SentencePiece's"):
        prepare({"train": [TEXT]}, tokenizer, tmp_path / "data", source="test")


def test_a_tokenizer_in_python_is_refused(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ByT5Tokenizer, .* that has a tokenizer.json"):
        load_tokenizer(tmp_path)


def test_saving_a_model_whose_tokenizer_loads_otherwise_is_refused(tmp_path):
    tokenizer = train_bpe([TEXT, PROBE], 400)
    tokenizer.backend_tokenizer.pre_tokenizer = byte_level(use_regex=False)
    with pytest.raises(ValueError, match=f"{tmp_path}/model as GPT2Tokenizer, .*make it"):
        save_model(tokenizer, tmp_path / "model")
    assert not list((tmp_path / "model").glob("*"))
    # The fix that the message names.
    fixed = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token
    )
    save_model(fixed, tmp_path / "model")
    assert encode(load_tokenizer(tmp_path / "model"), [PROBE]) == encode(tokenizer, [PROBE])


def test_truncation_and_padding_do_not_reach_the_data(tmp_path):
    bpe = changed()
    expected = [raw_ids(bpe, text) for text in (PROBE, "a")]
    bpe.enable_truncation(5)
    bpe.enable_padding(length=9)
    write_files(bpe, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    for _ in range(2):
        assert encode(tokenizer, [PROBE, "a"]) == expected
        tokenizer(TEXT, truncation=True, max_length=5)
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json")).truncation is None


def test_another_normalizer_is_not_encoded_by_tiktoken(gpt2):
    for plain in (gpt2, byte_tokenizer()):
        other = Tokenizer.from_str(plain.backend_tokenizer.to_str())
        other.normalizer = normalizers.NFC()
        other = PreTrainedTokenizerFast(tokenizer_object=other)
        for tokenizer in (plain, other):
            assert token_encoder(tokenizer)(PROBE).tolist() == encode(tokenizer, [PROBE])[0]
        assert encode(plain, [PROBE]) != encode(other, [PROBE])
