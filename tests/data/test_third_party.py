"""Token files of other trainers open and train as they are."""

import numpy as np
import pytest
from conftest import make_text, refused, run, tiny_config, write_lines
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gpt2_accel.data.shards import (
    TokenStream,
    data_fingerprint,
    load_data_tokenizer,
    read_manifest,
    verify_data,
)
from gpt2_accel.tokenizer import char_tokenizer, fingerprint, save_tokenizer, train_bpe

TOKENS = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")
WIDE = TOKENS.astype("<u4") + 20_000 * (TOKENS % 2)  # up to 70,255
LLAMA_3 = {"magic": 20240801, "version": 7}


def llmc(tokens, magic=20240520, version=1):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + tokens.tobytes()


def headerless(ids):
    return {"train.bin": ids[:4000].tobytes(), "val.bin": ids[4000:].tobytes()}


def with_headers(ids, **header):
    return {
        "fineweb_train_000001.bin": llmc(ids[:2500], **header),
        "fineweb_train_000002.bin": llmc(ids[2500:4000], **header),
        "fineweb_val_000000.bin": llmc(ids[4000:], **header),
    }


# A file of uint16 ids that begins as one of uint32 ids does: "!" is 0.
SHOUTS = np.array([*TOKENS[:4000], *[50256, 0] * 3000, *TOKENS[4000:]], "<u2")


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        (headerless(TOKENS), TOKENS),
        (headerless(SHOUTS), SHOUTS),
        (with_headers(TOKENS), TOKENS),
        (with_headers(WIDE, **LLAMA_3), WIDE),
    ],
    ids=["nanoGPT", "shouts", "llm.c", "Llama 3"],
)
def test_files_of_other_trainers_are_read_without_conversion(tmp_path, files, ids, characters):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if sum(map(len, files.values())) >= 4 * len(ids):
        with refused("tokenizer.json, into .*/tokenizer"):
            read_manifest(tmp_path)
        (tmp_path / "tokenizer").symlink_to(characters)
        assert read_manifest(tmp_path)["tokenizer"]["vocab_size"] == 71_000
    else:
        assert read_manifest(tmp_path)["tokenizer"]["end_of_text"] == 50256
    train, val = (TokenStream(tmp_path, split) for split in ("train", "val"))
    assert train.read(0, train.tokens).tolist() == ids[:4000].tolist()
    assert train.read(2490, 20).tolist() == ids[2490:2510].tolist()
    assert val.read(0, val.tokens).tolist() == ids[4000:].tolist()
    assert verify_data(tmp_path) == len(files)
    before = data_fingerprint(tmp_path)
    (tmp_path / list(files)[-1]).unlink()
    assert data_fingerprint(tmp_path) != before


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """The folder of a tokenizer of 71,000 characters."""
    folder = tmp_path_factory.mktemp("characters")
    save_tokenizer(char_tokenizer(map(chr, range(0x20000, 0x20000 + 71_000))), folder, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hellaswag_val.bin", llmc(TOKENS, magic=20240522), "hellaswag_val.bin .*20240522"),
        ("x_train_000001.bin", llmc(TOKENS, version=2), "x_train_000001.bin .*2"),
        ("train.bin", TOKENS.astype("<i8").tobytes(), "train.bin .* more than 16 bits"),
        ("val.bin", WIDE.tobytes(), "val.bin .* more than 16 bits"),
        ("val.bin", WIDE[:9].tobytes()[:-1], "val.bin .* more than 16 bits"),
        ("val.bin", llmc(WIDE, **LLAMA_3), "folder of their own"),
    ],
)
def test_other_token_files_are_refused_by_name(tmp_path, name, content, message):
    (tmp_path / "other_train.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / name).write_bytes(content)
    with refused(message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [TOKENS.tobytes()[:-1], llmc(TOKENS)[:-2]])
def test_truncated_files_are_refused(tmp_path, content):
    (tmp_path / "train.bin").write_bytes(content)
    with refused("train.bin is not the shard"):
        TokenStream(tmp_path, "train")


def test_the_character_data_of_nanogpt_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / "meta.pkl").write_bytes(b"")
    with refused("pickle"):
        read_manifest(tmp_path)


def test_documents_of_llama_3_begin_with_bos_in_files_of_llmc(tmp_path):
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 5}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "train.bin").write_bytes(llmc(np.array([0, 5, 5, 5], "<u4"), **LLAMA_3))
    assert read_manifest(tmp_path)["tokenizer"]["end_of_text"] == 0


# datatrove


TEXTS = [make_text(60, seed) for seed in range(90)]


@pytest.fixture(scope="module")
def trained_bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    save_tokenizer(train_bpe(TEXTS, 300), folder, folder)
    return folder


@pytest.fixture(scope="module")
def datatrove(trained_bpe, tmp_path_factory):
    """`TEXTS`, tokenized by datatrove in three tasks, and merged, as in docs/data.md."""
    pytest.importorskip("datatrove")
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger

    folder = tmp_path_factory.mktemp("datatrove")
    (folder / "text").mkdir()
    for number in range(3):
        rows = [{"text": text} for text in TEXTS[number::3]]
        write_lines(folder / f"text/{number}.jsonl", rows)
    tokens, merged = str(folder / "tokens"), str(folder / "merged")
    options = {"tokenizer_name_or_path": str(trained_bpe / "tokenizer.json"), "seed": 1}
    tokenizer = DocumentTokenizer(tokens, eos_token="<|endoftext|>", **options)
    merger = DocumentTokenizerMerger(
        tokens, merged, "words", max_tokens_per_file=4000, seed=1, progress=False
    )
    for steps, tasks in (([JsonlReader(str(folder / "text")), tokenizer], 4), ([merger], 1)):
        logs = str(folder / f"logs-{tasks}")  # the last of four tasks has no file
        LocalPipelineExecutor(steps, tasks=tasks, logging_dir=logs).run()
    return folder


@pytest.mark.parametrize("name", ["tokens", "merged"])
def test_a_folder_of_datatrove_trains(name, datatrove, tmp_path):
    data = datatrove / name
    train, val = (TokenStream(data, split) for split in ("train", "val"))
    total = train.tokens + val.tokens
    assert val.tokens == total // 20
    assert len(list(data.glob("*.ds"))) > 1
    ids = np.concatenate([stream.read(0, stream.tokens) for stream in (train, val)])
    text = load_data_tokenizer(data).decode(ids.tolist())
    assert sorted(text.split("<|endoftext|>")[:-1]) == sorted(TEXTS)
    assert read_manifest(data)["tokenizer"]["end_of_text"] == 299
    assert verify_data(data) > 2
    settings = {"max_steps": 30, "eval_every": 30, "document_mask": True}
    assert run(tiny_config(data, tmp_path / "run", **settings))[-1]["val/loss"] < 4
    run(tiny_config(data, tmp_path / "run", max_steps=31, resume_from="latest"))


def write_ds(folder, tokens, kind, name="000_words"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.ds").write_bytes(tokens.tobytes())
    (folder / f"{name}.ds.metadata").write_text(f"{kind}\n{len(tokens)}\n{len(tokens)} T")


def test_the_tokenizer_gpt2_of_datatrove_is_the_bpe_of_gpt2(tmp_path, gpt2):
    write_ds(tmp_path, np.append(TOKENS[:999], 50256).astype("<u2"), "gpt2")
    assert fingerprint(load_data_tokenizer(tmp_path)) == fingerprint(gpt2)
    assert read_manifest(tmp_path)["tokenizer"]["end_of_text"] == 50256


def test_incomplete_files_of_datatrove_are_refused(tmp_path, trained_bpe):
    write_ds(tmp_path / "cut", TOKENS[:9], f"{trained_bpe}|4")
    with refused("is not the shard"):
        TokenStream(tmp_path / "cut", "train")
    write_ds(tmp_path / "running", TOKENS[:9], f"{trained_bpe}|2")
    (tmp_path / "running/1.ds").touch()
    with refused("1.ds has no readable"):
        TokenStream(tmp_path / "running", "train")
