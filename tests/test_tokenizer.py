"""Tokenizers: their ids, what `AutoTokenizer` makes of their files, and what is refused."""

import json

import pytest
import tiktoken
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data import documents
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.shards import TokenStream
from gpt2_accel.data.source import open_data
from gpt2_accel.evals.items import Item
from gpt2_accel.evals.likelihood import encode_question
from gpt2_accel.evals.perplexity import TextPerplexity
from gpt2_accel.first_model import document_separator
from gpt2_accel.generation.sampling import encode_prompt
from gpt2_accel.hf.convert import special_ids
from gpt2_accel.tokenizer import (
    PROBE,
    byte_symbols,
    byte_tokenizer,
    char_tokenizer,
    encode,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
    text_ends,
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
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text, split_special_tokens=True)["input_ids"] == ids
    assert again.decode(ids) == text
    assert again.model_max_length == 8
    assert (tmp_path / "vocab.json").exists()
    assert fingerprint(again) == fingerprint(tokenizer)
    assert raw_ids(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), text) == ids
    assert encode(load_tokenizer(tmp_path), [text])[0] == ids


def test_gpt2_ids_equal_tiktoken(gpt2):
    assert len(gpt2) == 50257
    assert gpt2.eos_token_id == 50256
    fast = token_encoder(gpt2)
    assert fast.__name__ == "fast"  # tiktoken

    @given(st.text())
    @settings(deadline=None, max_examples=300)
    def check(text):
        ids = tiktoken.get_encoding("gpt2").encode_ordinary(text)
        assert encode(gpt2, [text])[0] == fast(text).tolist() == ids

    check()


def byte_level(**options) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def changed(**parts) -> Tokenizer:
    """A byte-level BPE with `<|endoftext|>` and GPT-2's word splitting, but for the given parts."""
    bpe = Tokenizer.from_str(train_bpe([PROBE, TEXT], 400).backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(bpe, name, part)
    return bpe


def write_files(bpe, folder, tokenizer_class="PreTrainedTokenizerFast"):
    """Writes the files of a tokenizer and a GPT-2's config.json, as a Hub repository has them."""
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    settings = {"eos_token": "<|endoftext|>", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    GPT2Config(vocab_size=bpe.get_vocab_size()).save_pretrained(folder)


def splitting(*parts) -> dict:
    return {"pre_tokenizer": pre_tokenizers.Sequence(list(parts))}


PARTS = {
    "as GPT-2": {},
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
def test_token_ids_equal_tokenizer_json(parts, name, tmp_path):
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


# What stands between documents, before prompts and contexts, and ends a text

END, BOS, EOS = "<|endoftext|>", "<s>", "</s>"
CHAT = (END, "<|im_start|>", "<|im_end|>")


def kind(tokens, adds=False, **roles):
    """A tokenizer of bytes, with special tokens from 256 on; if `adds`, the first begins a text."""
    vocab = {symbol: i for i, symbol in enumerate([*byte_symbols(), *tokens])}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer = byte_level()
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(tokens))
    if adds:
        bpe.post_processor = processors.TemplateProcessing(
            f"{tokens[0]} $A", None, [(tokens[0], 256)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **roles)


def sentencepiece(*prefix):
    """A tokenizer like Gemma's, or like Llama 2's with a `Prepend`. "▁" has the id 4, "a" 5."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *"▁abcd,0"]
    tokens += [f"<0x{i:02X}>" for i in range(256)]
    bpe = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    bpe.decoder = decoders.Sequence(parts + strip)
    bpe.add_special_tokens(tokens[:4])
    bpe.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>")


LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>")


# By the names of tokenizer.yaml.
SEPARATED = {
    "GPT-2": kind([END], bos_token=END, eos_token=END, unk_token=END),
    "Qwen3": kind(CHAT, pad_token=END, eos_token=CHAT[2]),
    "Llama 3": kind(LLAMA_3, True, bos_token=LLAMA_3[0], eos_token=LLAMA_3[1]),
    "<s> </s>": kind([BOS, "<pad>", EOS], bos_token=BOS, pad_token="<pad>", eos_token=EOS),
    "characters": char_tokenizer("abcd "),
    "Gemma": sentencepiece(),
}


@pytest.mark.parametrize("name", SEPARATED)
def test_special_tokens_separate_documents_and_nothing_else(name, tmp_path, monkeypatch):
    tokenizer = SEPARATED[name]
    expected, before, ends = table("tokenizer")[name]
    monkeypatch.setattr(documents, "CHUNK", 3)  # "ab c" is read in two chunks
    data = tmp_path / "data"
    manifest = prepare({"train": ["ab c", "d"]}, tokenizer, data, source="test")
    stream = TokenStream(data, "train")
    assert stream.read(0, stream.tokens).tolist() == expected
    start = expected[:1] if ends else []
    assert manifest["splits"]["train"]["documents"] == 2
    if start:
        assert document_separator(open_data(data)) == start[0]
        assert encode_prompt(tokenizer, "") == start
    else:
        assert manifest["separation"].startswith("documents are not separated")
        with refused("document_mask"):
            document_separator(open_data(data))
    [text] = encode(tokenizer, ["ab c"])
    assert encode_prompt(tokenizer, "ab c") == before + text
    [row] = encode_question(tokenizer, "ab", [" c"], "")
    assert row.ids == before + text
    shape = GPTConfig(len(tokenizer), n_positions=8, n_layer=1, n_head=1, n_embd=8)
    [[row]] = TextPerplexity([Item("a", {"text": "ab c"})], tokenizer, shape).questions
    assert row.ids == start + text
    ids = special_ids(tokenizer, len(tokenizer))
    assert [ids["bos_token_id"], ids["eos_token_id"]] == [*start, *ends[:1]] or not ends
    assert text_ends(tokenizer) == ends


def fast(**parts):
    return PreTrainedTokenizerFast(tokenizer_object=changed(**parts), eos_token=END)


USABLE = {
    "Gemma": (sentencepiece(), True),
    "NFC": (fast(normalizer=normalizers.NFC()), True),
    "Llama 2": (sentencepiece(normalizers.Prepend("▁")), False),
    "Mistral": (fast(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), False),
    "RoBERTa": (fast(pre_tokenizer=byte_level(add_prefix_space=True)), False),
}


@pytest.mark.parametrize("name", USABLE)
def test_a_tokenizer_is_usable_if_text_comes_back_and_continuations_follow(name, tmp_path):
    tokenizer, usable = USABLE[name]
    tokenizer.save_pretrained(tmp_path / "model")
    if usable:
        loaded = load_tokenizer(tmp_path / "model")
        assert loaded.decode(encode(loaded, ["0, 0"])[0]) == "0, 0"
        return
    for use in (load_tokenizer, lambda folder: save_tokenizer(tokenizer, folder, folder)):
        with refused("model has a tokenizer that puts a space"):
            use(tmp_path / "model")


def test_code_in_a_tokenizer_directory_is_never_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "y")
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    code = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | code))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with refused("holds no tokenizer: .*contains custom code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_type_of_model_with_its_own_tokenizer_keeps_the_ids_of_the_package(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    for _ in range(2):
        save_tokenizer(BPE, tmp_path, tmp_path)
    assert encode(load_tokenizer(tmp_path), [PROBE]) == encode(BPE, [PROBE])
    assert capsys.readouterr().err.count("as Qwen2Tokenizer, with other token ids") == 1


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
    save_tokenizer(tokenizer, tmp_path / "saved", "saved")
    assert Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json")).truncation is None
