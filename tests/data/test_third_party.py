"""Token files of other trainers are imported."""

import shutil

import numpy as np
import pytest
from conftest import contents, make_text, refused, run, tiny_config, write_lines

from gpt2_accel.data.shards import TokenStream
from gpt2_accel.data.source import open_data, verify_data
from gpt2_accel.data.third_party import import_tokens
from gpt2_accel.tokenizer import save_tokenizer, train_bpe

TOKENS = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")


def llmc(tokens, magic=20240520, version=1):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + tokens.tobytes()


def with_headers(ids):
    return {
        "fineweb_train_000001.bin": llmc(ids[:2500]),
        "fineweb_train_000002.bin": llmc(ids[2500:4000]),
        "fineweb_val_000000.bin": llmc(ids[4000:]),
    }


# A file of uint16 ids that begins as one of uint32 ids does: "!" is 0.
SHOUTS = np.array([*TOKENS[:4000], *[50256, 0] * 3000, *TOKENS[4000:]], "<u2")


@pytest.fixture(autouse=True)
def built_once(gpt2, monkeypatch):
    """GPT-2's tokenizer takes a second to build."""
    monkeypatch.setattr("gpt2_accel.data.third_party.gpt2_tokenizer", lambda: gpt2)


def imported(source, data_dir):
    """Returns the manifest of the token files of `source`, imported into `data_dir`."""
    return import_tokens(str(source), data_dir, "the command")


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"train.bin": SHOUTS[:4000].tobytes(), "val.bin": SHOUTS[4000:].tobytes()}, SHOUTS),
        (with_headers(TOKENS), TOKENS),
    ],
    ids=["nanoGPT", "llm.c"],
)
def test_token_files_of_other_trainers_are_imported(tmp_path, files, ids):
    source, data = tmp_path / "theirs", tmp_path / "ours"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    before = contents(source)
    for _ in range(2):  # a second start finds the folder
        assert imported(source, data)["tokenizer"]["end_of_text"] == 50256
    assert contents(source) == before
    train, val = (TokenStream(data, split) for split in ("train", "val"))
    assert train.read(0, train.tokens).tolist() == ids[:4000].tolist()
    assert train.read(2490, 20).tolist() == ids[2490:2510].tolist()
    assert val.read(0, val.tokens).tolist() == ids[4000:].tolist()
    assert verify_data(data) == 2


def test_wide_ids_of_llm_c_need_their_tokenizer(trained_bpe, tmp_path):
    ids = TOKENS.astype("<u4") % 300
    file = tmp_path / "x_train_0.bin"
    file.write_bytes(llmc(ids, magic=20240801, version=7))
    (tmp_path / "y_train_0.bin").touch()  # not asked for
    with pytest.raises(FileNotFoundError, match="tokenizer/"):
        imported(file, tmp_path / "data")
    shutil.copytree(trained_bpe, tmp_path / "tokenizer")
    assert imported(file, tmp_path / "data")["dtype"] == "uint32"
    assert TokenStream(tmp_path / "data", "train").read(0, 5000).tolist() == ids.tolist()


def test_a_folder_of_token_files_is_refused_with_the_command_that_imports_it(tmp_path):
    (tmp_path / "train.bin").write_bytes(TOKENS.tobytes())
    with refused("is not prepared .* import .* --data_dir NEW_FOLDER --ignore_changes"):
        TokenStream(tmp_path, "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hellaswag_val.bin", llmc(TOKENS, magic=20240522), "hellaswag_val.bin holds the token"),
        ("x_train_000001.bin", llmc(TOKENS, version=2), "x_train_000001.bin holds the token"),
        ("train.bin", TOKENS.astype("<i8").tobytes(), "train.bin does not hold uint16 ids"),
        ("val.bin", TOKENS.astype("<u4").tobytes(), "val.bin does not hold uint16 ids"),
        ("val.bin", TOKENS.tobytes()[:-1], "val.bin does not hold 5,000 tokens"),
        ("val.bin", llmc(TOKENS)[:-2], "val.bin does not hold 5,000 tokens"),
        ("meta.pkl", b"", "nanoGPT's characters"),
    ],
)
def test_other_token_files_are_refused_by_name(tmp_path, name, content, message):
    (tmp_path / "other_train.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / name).write_bytes(content)
    with refused(message):
        imported(tmp_path, tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["other_train.bin", name])


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
    text = open_data(data).tokenizer.decode(ids.tolist())
    assert sorted(text.split("<|endoftext|>")[:-1]) == sorted(TEXTS)
    settings = {"eval_every": 8, "document_mask": True}
    assert "val/loss" in run(tiny_config(data, tmp_path / "run", **settings))[-1]


def write_ds(folder, tokens, kind, name="000_words"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.ds").write_bytes(tokens.tobytes())
    (folder / f"{name}.ds.metadata").write_text(f"{kind}\n{len(tokens)}\n{len(tokens)} T")


@pytest.mark.parametrize(
    ("kind", "message"),
    [("|4", "words.ds does not hold 9 tokens"), ("", "1.ds.metadata"), ("|2", "files of 2 kinds")],
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
