"""Token files of other trainers are imported; runs that 0.5 began on them go on."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import (
    contents,
    losses,
    make_text,
    refused,
    run,
    tiny_config,
    write_lines,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gpt2_accel.checkpoint.find import read_state
from gpt2_accel.data import third_party
from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.shards import (
    TokenStream,
    data_fingerprint,
    load_data_tokenizer,
    verify_data,
)
from gpt2_accel.data.third_party import import_tokens
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


def imported(source, data_dir):
    """Returns the manifest of the token files of `source`, imported into `data_dir`."""
    return import_tokens(str(source), data_dir, "the command")


@pytest.mark.parametrize(
    ("files", "ids", "fingerprint_05"),
    [
        (headerless(TOKENS), TOKENS, "3238a310a6d9901a"),
        (headerless(SHOUTS), SHOUTS, "c84b1e9e865f2508"),
        (with_headers(TOKENS), TOKENS, "5d2b7d4941d3a43d"),
        (with_headers(WIDE, **LLAMA_3), WIDE, "3a95c321f613bbef"),
    ],
    ids=["nanoGPT", "shouts", "llm.c", "Llama 3"],
)
def test_token_files_of_other_trainers_are_imported(
    tmp_path, monkeypatch, files, ids, fingerprint_05, characters
):
    source, data = tmp_path / "theirs", tmp_path / "ours"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    if "3a95" in fingerprint_05:
        with refused("tokenizer holds no tokenizer"):
            imported(source, data)
        (source / "tokenizer").symlink_to(characters)
    before = contents(source)
    monkeypatch.setattr(third_party, "CHUNK", 1500)  # tokens of a shard
    for _ in range(2):  # a second start finds the folder
        end_of_text = imported(source, data)["tokenizer"]["end_of_text"]
    assert contents(source) == before
    assert end_of_text == (None if "3a95" in fingerprint_05 else 50256)
    train, val = (TokenStream(data, split) for split in ("train", "val"))
    assert train.read(0, train.tokens).tolist() == ids[:4000].tolist()
    assert train.read(2490, 20).tolist() == ids[2490:2510].tolist()
    assert val.read(0, val.tokens).tolist() == ids[4000:].tolist()
    assert verify_data(data) == len(train.shards) + len(val.shards)
    assert data_fingerprint(data, "imported").startswith(fingerprint_05)
    assert not data_fingerprint(data).startswith(fingerprint_05)  # has checksums


def test_one_file_is_imported(tmp_path):
    (tmp_path / "x_train_000001.bin").write_bytes(llmc(TOKENS))
    (tmp_path / "y_train_000001.bin").write_bytes(llmc(TOKENS[::-1]))
    manifest = imported(tmp_path / "x_train_000001.bin", tmp_path / "data")
    assert {split: entry["tokens"] for split, entry in manifest["splits"].items()} == {
        "train": 5000
    }


def test_a_run_of_0_5_goes_on_with_the_imported_files(tmp_path, monkeypatch):
    """Also with a mixture of them."""
    weights = {}
    for name, files in (("a", headerless(TOKENS)), ("b", with_headers(TOKENS[::-1]))):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
        with refused(f"{name} is not prepared .* import .*{name} --data_dir NEW_FOLDER"):
            TokenStream(tmp_path / name, "train")
        imported(tmp_path / name, tmp_path / f"{name}-imported")
        weights[str(tmp_path / f"{name}-imported")] = 0.75 if weights else 0.25
    write_mixture(tmp_path / "mixed", weights)
    assert data_fingerprint(tmp_path / "mixed", "imported").startswith("58c89b65350acfdc")

    def in_0_5(folder, splits=""):
        return data_fingerprint(folder, "imported")

    for data in ("a-imported", "mixed"):
        config = tiny_config(tmp_path / data, tmp_path / f"run-{data}", max_steps=4, save_every=2)
        with monkeypatch.context() as patch:
            patch.setattr("gpt2_accel.run.data_fingerprint", in_0_5)
            expected = losses(run(config))
        first = str(tmp_path / f"run-{data}/checkpoint-2")
        again = replace(config, output_dir=str(tmp_path / f"again-{data}"), resume_from=first)
        assert losses(run(again)) == expected[2:]
        assert read_state(next(tmp_path.glob("again*/checkpoint-4")))["data"] != in_0_5(
            tmp_path / data
        )


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """The folder of a tokenizer of 71,000 characters."""
    folder = tmp_path_factory.mktemp("characters")
    save_tokenizer(char_tokenizer(map(chr, range(0x20000, 0x20000 + 71_000))), folder, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hellaswag_val.bin", llmc(TOKENS, magic=20240522), "hellaswag_val.bin holds the token"),
        ("x_train_000001.bin", llmc(TOKENS, version=2), "x_train_000001.bin holds the token"),
        ("train.bin", TOKENS.astype("<i8").tobytes(), "train.bin does not hold uint16 ids"),
        ("val.bin", WIDE.tobytes(), "val.bin does not hold uint16 ids"),
        ("val.bin", WIDE[:9].tobytes()[:-1], "val.bin does not hold uint16 ids"),
        ("val.bin", b"GPT2TOKS" + TOKENS.tobytes(), "restore the manifest.json"),
        ("val.bin", llmc(WIDE, **LLAMA_3), "files of 2 kinds"),
        ("val.bin", TOKENS.tobytes()[:-1], "val.bin is not the shard"),
        ("val.bin", llmc(TOKENS)[:-2], "val.bin is not the shard"),
        ("meta.pkl", b"", "nanoGPT's characters"),
    ],
)
def test_other_token_files_are_refused_by_name(tmp_path, name, content, message):
    (tmp_path / "other_train.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / name).write_bytes(content)
    with refused(message):
        imported(tmp_path, tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["other_train.bin", name])


def test_documents_of_llama_3_begin_with_bos_in_files_of_llmc(tmp_path):
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "train.bin").write_bytes(llmc(np.array([0, 2, 2, 2], "<u4"), **LLAMA_3))
    assert imported(tmp_path, tmp_path / "data")["tokenizer"]["end_of_text"] == 0


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
    data = tmp_path / "data"
    assert imported(datatrove / name, data)["tokenizer"]["end_of_text"] == 299
    train, val = (TokenStream(data, split) for split in ("train", "val"))
    total = train.tokens + val.tokens
    assert val.tokens == total // 20
    assert len(list((datatrove / name).glob("*.ds"))) > 1
    ids = np.concatenate([stream.read(0, stream.tokens) for stream in (train, val)])
    text = load_data_tokenizer(data).decode(ids.tolist())
    assert sorted(text.split("<|endoftext|>")[:-1]) == sorted(TEXTS)
    settings = {"max_steps": 30, "eval_every": 30, "document_mask": True}
    assert run(tiny_config(data, tmp_path / "run", **settings))[-1]["val/loss"] < 4
    run(tiny_config(data, tmp_path / "run", max_steps=31, resume_from="latest"))


def write_ds(folder, tokens, kind, name="000_words"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.ds").write_bytes(tokens.tobytes())
    (folder / f"{name}.ds.metadata").write_text(f"{kind}\n{len(tokens)}\n{len(tokens)} T")


def test_a_run_of_0_5_on_files_of_datatrove_goes_on(tmp_path, gpt2):
    write_ds(tmp_path / "a", np.append(TOKENS[:999], 50256).astype("<u2"), "gpt2")
    write_ds(tmp_path / "a", np.append(TOKENS[:300], 50256).astype("<u2"), "gpt2", "001_words")
    write_ds(
        tmp_path / "b", np.append(TOKENS[:999], 50256).astype("<u2"), "openai-community/gpt2|2"
    )
    for name, recorded in (("a", "9ad7f5f5d7f53aec"), ("b", "dad7b6642245ba7b")):
        data = tmp_path / f"{name}-imported"
        imported(tmp_path / name, data)
        assert fingerprint(load_data_tokenizer(data)) == fingerprint(gpt2)
        assert data_fingerprint(data, "imported").startswith(recorded)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("|4", "is not the shard"), ("", "1.ds.metadata"), ("|2", "files of 2 kinds")],
)
def test_incomplete_files_of_datatrove_are_refused(tmp_path, trained_bpe, kind, message):
    source = tmp_path / "source"
    write_ds(source, TOKENS[:9] % 300, f"{trained_bpe}{kind}")
    if not kind:
        (source / "1.ds").touch()
    if kind == "|2":
        write_ds(source, TOKENS[:9], "gpt2", "1")
    with refused(message):
        imported(source, tmp_path / "data")
