import json
import pickle

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.prepare import prepare
from gpt2_accel.hf.chat_template import CHATML
from gpt2_accel.tokenizer import (
    PROBE,
    byte_tokenizer,
    bytes_per_token,
    char_tokenizer,
    conversation_tokens,
    encode,
    fingerprint,
    load_tokenizer,
    prompt_tokens,
    save_tokenizer,
    token_encoder,
    train_bpe,
)

TEXT = "def f(x):\n    return x + 1\n\ndef g(y):\n    return f(y) * 2\n" * 20


def reloaded(tokenizer, folder):
    """What AutoTokenizer makes of the files beside a GPT-2's config."""
    model = GPT(GPTConfig(len(tokenizer), n_positions=8, n_layer=1, n_head=1, n_embd=8))
    save_pretrained(model, folder, tokenizer)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "tokenizer",
    [byte_tokenizer(), train_bpe([TEXT], 300), char_tokenizer(TEXT), char_tokenizer(PROBE), None],
    ids=["bytes", "bpe", "char", "chars of the probe", "gpt2"],
)
def test_autotokenizer_encodes_and_decodes_alike(tokenizer, gpt2, tmp_path):
    tokenizer = tokenizer or gpt2
    text = TEXT if len(tokenizer) == len(set(TEXT)) else PROBE
    again = reloaded(tokenizer, tmp_path)
    [ids] = encode(tokenizer, [text])
    assert again(text, split_special_tokens=True)["input_ids"] == ids
    assert again.decode(ids) == tokenizer.decode(ids) == text
    assert fingerprint(again) == fingerprint(tokenizer)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ids == raw_ids(raw, text) == encode(load_tokenizer(tmp_path), [text])[0]
    Qwen3Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)  # the class depends on it, too
    save_tokenizer(tokenizer, tmp_path)
    assert encode(load_tokenizer(tmp_path), [text])[0] == ids


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
    for size in (257, 2**20 + 1):
        with pytest.raises(ValueError, match="vocab_size of a BPE is from 258"):
            train_bpe([TEXT], size)


def test_the_literal_separator_is_text():
    tokenizer = byte_tokenizer()
    assert encode(tokenizer, ["<|endoftext|>"]) == [list(b"<|endoftext|>")]


def test_unknown_characters_are_named():
    tokenizer = char_tokenizer("abc")
    for encodes in (lambda text: encode(tokenizer, [text]), token_encoder(tokenizer)):
        with pytest.raises(ValueError, match=r"does not know the characters \['d', 'é'\]"):
            encodes("abécd")


def test_gpt2_ids_are_tiktokens_saved_too(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    gpt2 = AutoTokenizer.from_pretrained(tmp_path)
    assert len(gpt2) == 50257
    assert gpt2.eos_token_id == 50256

    @given(st.text())
    @settings(deadline=None, max_examples=300)
    def check(text):
        assert encode(gpt2, [text])[0] == tiktoken.get_encoding("gpt2").encode_ordinary(text)

    check()


def plain_bpe(pre_tokenizer=None) -> Tokenizer:
    """A byte-level BPE with `<|endoftext|>`, as the tokenizers library makes it, by default with GPT-2's word splitting."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([PROBE, TEXT], trainer)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    return bpe


def change_pre_tokenizer(bpe):
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+(?!\S)|\s*[\r\n]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def add_prefix_space(bpe):
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def leave_words_whole(bpe):
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def normalize(bpe):
    bpe.normalizer = normalizers.NFC()


def keep(bpe):
    bpe.add_tokens([AddedToken("it's", lstrip=True), AddedToken("four", single_word=True)])


def write_files(bpe, folder, tokenizer_class=None, config=True):
    """Writes tokenizer.json, tokenizer_config.json and a GPT-2's config.json, as a Hub repository has them."""
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", **named})
    )
    if config:
        GPT2Config(vocab_size=bpe.get_vocab_size()).save_pretrained(folder)


@pytest.mark.parametrize("name", [None, "GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize(
    "change", [change_pre_tokenizer, add_prefix_space, leave_words_whole, normalize]
)
def test_a_tokenizer_that_autotokenizer_changes_is_loaded_from_its_file(change, name, tmp_path):
    bpe = plain_bpe()
    change(bpe)
    write_files(bpe, tmp_path / "model", name)
    changed = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert encode(changed, [PROBE]) != [raw_ids(bpe, PROBE)]
    loaded = load_tokenizer(tmp_path / "model")
    assert encode(loaded, [PROBE]) == [raw_ids(bpe, PROBE)]
    assert loaded.eos_token == "<|endoftext|>"
    save_tokenizer(loaded, tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert encode(again, [PROBE]) == [raw_ids(bpe, PROBE)]


def raw_ids(bpe: Tokenizer, text: str) -> list[int]:
    bpe.encode_special_tokens = True
    return bpe.encode(text).ids


# transformers 5.17 replaces the pre-tokenizer of a LlamaTokenizer, 5.23 does not.
@pytest.mark.parametrize(
    "name", [None, "GPT2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizer"]
)
@pytest.mark.parametrize("change", [lambda bpe: None, keep], ids=["plain", "added"])
def test_a_tokenizer_that_autotokenizer_leaves_alone_is_loaded(change, name, tmp_path):
    bpe = plain_bpe()
    change(bpe)
    write_files(bpe, tmp_path / "model", name)
    assert encode(load_tokenizer(tmp_path / "model"), [PROBE]) == [raw_ids(bpe, PROBE)]


def test_the_digits_of_smollm2_stay_apart(tmp_path):
    """Its files name GPT2Tokenizer, with which transformers 5.23 loses the digits' splitting."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = plain_bpe(pre_tokenizers.Sequence([digits, byte_level]))
    write_files(bpe, tmp_path / "model", "GPT2Tokenizer")
    tokenizer = load_tokenizer(tmp_path / "model")
    prepare({"train": [TEXT], "val": [TEXT]}, tokenizer, tmp_path / "data", source="test")
    again = load_tokenizer(tmp_path / "data/tokenizer")
    text = "a  12\n\n    345 6\u00bd\u00b2 x"
    for each in (tokenizer, again):
        [ids] = encode(each, [text])
        assert ids == raw_ids(bpe, text) == token_encoder(each)(text).tolist()
        assert bytes_per_token(each)[ids].sum() == len(text.encode())
        assert each.decode(ids) == text


@pytest.mark.parametrize("bomb", ["(a+)+b", r"(\w+\s?)+$"], ids=["on some text", "on any text"])
def test_a_slow_regular_expression_is_named(bomb, tmp_path):
    """The library panics, and its `PanicException` is no `Exception`."""
    bpe, text = plain_bpe(), "a" * 60 + "!"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(bomb), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    write_files(bpe, tmp_path / "model", "PreTrainedTokenizerFast")
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.chat_template = CHATML
    said = [{"role": "user", "content": text}]
    for encodes in (
        lambda: encode(tokenizer, [text]),
        lambda: token_encoder(tokenizer)(text),
        lambda: conversation_tokens(tokenizer, said),
        lambda: prompt_tokens(tokenizer, said),
    ):
        with pytest.raises(
            ValueError, match="a regular expression in its tokenizer.json is too slow"
        ):
            encodes()


def sentencepiece(kind) -> Tokenizer:
    """A BPE as TinyLlama's: U+2581 for a space, also before a text, and byte tokens such as <0x0A>."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "Prepend":
        parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        bpe.normalizer = normalizers.Sequence(parts)
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    bpe.train_from_iterator([TEXT], trainer)
    return bpe


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("kind", ["Prepend", "Metaspace"])
def test_a_tokenizer_of_sentencepieces_kind_is_refused(kind, name, tmp_path):
    write_files(sentencepiece(kind), tmp_path / "model", name)
    with pytest.raises(ValueError, match="model has a tokenizer of SentencePiece's kind, which"):
        load_tokenizer(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece(kind))
    with pytest.raises(ValueError, match="data/tokenizer has a tokenizer of SentencePiece's kind"):
        prepare({"train": [TEXT]}, tokenizer, tmp_path / "data", source="test")


def test_saving_a_tokenizer_that_loads_otherwise_is_refused(tmp_path):
    tokenizer = train_bpe([TEXT, PROBE], 400)
    leave_words_whole(tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=f"{tmp_path}/data/tokenizer as GPT2Tokenizer, .*make it"):
        prepare({"train": [TEXT]}, tokenizer, tmp_path / "data", source="test")
    model = GPT(GPTConfig(len(tokenizer), n_positions=8, n_layer=1, n_head=1, n_embd=8))
    with pytest.raises(ValueError, match=f"{tmp_path}/model as GPT2Tokenizer, .*make it"):
        save_pretrained(model, tmp_path / "model", tokenizer)
    assert not list((tmp_path / "model").glob("*"))
    # The fix that the message names.
    fixed = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token
    )
    save_pretrained(model, tmp_path / "model", fixed)
    assert encode(load_tokenizer(tmp_path / "model"), [PROBE]) == encode(tokenizer, [PROBE])


def test_a_checkpoint_does_not_load_its_tokenizer_again(tmp_path, monkeypatch):
    tokenizer = train_bpe([TEXT], 300)
    save_tokenizer(tokenizer, tmp_path / "first")
    for kind in (AutoTokenizer, type(tokenizer)):
        monkeypatch.setattr(kind, "from_pretrained", None)
    save_tokenizer(tokenizer, tmp_path / "second")
    with pytest.raises(FileNotFoundError):
        save_tokenizer(train_bpe([TEXT], 270), tmp_path / "third")


def test_truncation_and_padding_do_not_reach_the_data(tmp_path):
    bpe = plain_bpe()
    expected = [raw_ids(bpe, text) for text in (PROBE, "a")]
    bpe.enable_truncation(5)
    bpe.enable_padding(length=9)
    write_files(bpe, tmp_path / "model", "PreTrainedTokenizerFast")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert encode(tokenizer, [PROBE, "a"]) == expected
    tokenizer(TEXT, truncation=True, max_length=5)
    assert encode(tokenizer, [PROBE, "a"]) == expected
    tokenizer(TEXT, truncation=True, max_length=5)
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json")).truncation is None


def test_a_tokenizer_in_python_is_refused(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="ByT5Tokenizer, .* use a tokenizer that has a tokenizer.json"
    ):
        load_tokenizer(tmp_path)


def test_gpt2s_vocabulary_with_another_normalizer_is_not_encoded_by_tiktoken(gpt2):
    changed = PreTrainedTokenizerFast(tokenizer_object=gpt2.backend_tokenizer)
    changed.backend_tokenizer.normalizer = normalizers.NFC()
    for tokenizer in (gpt2, changed):
        assert token_encoder(tokenizer)(PROBE).tolist() == encode(tokenizer, [PROBE])[0]
    assert encode(gpt2, [PROBE]) != encode(changed, [PROBE])


@pytest.mark.parametrize(
    "tokenizer",
    [byte_tokenizer(), train_bpe([TEXT], 300), char_tokenizer(PROBE), None],
    ids=["bytes", "bpe", "characters", "gpt2"],
)
def test_a_worker_encodes_like_the_tokenizer(tokenizer, gpt2):
    tokenizer = tokenizer or gpt2
    encoder = pickle.loads(pickle.dumps(token_encoder(tokenizer)))
    for text in (PROBE, "", "\r\n\n"):
        assert encoder(text).tolist() == encode(tokenizer, [text])[0]


def test_normalized_bytes_and_characters_are_not_looked_up_in_a_table():
    for tokenizer, text in ((byte_tokenizer(), "e\u0301"), (char_tokenizer("abc"), "ABC")):
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Lowercase()]
        )
        assert token_encoder(tokenizer)(text).tolist() == encode(tokenizer, [text])[0]
