"""Preparation of text into shards: sources, kills, full disks and wrong inputs."""

import bz2
import csv
import gzip
import itertools
import json
import os
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from accelerate import Accelerator
from conftest import WORDS, long, make_text, refused, run_recipe
from datasets import Dataset
from filelock import FileLock
from hub_server import TOKEN, Hub
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import python
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gpt2_accel import GPTConfig
from gpt2_accel.data import documents
from gpt2_accel.data.documents import chunks, split_of
from gpt2_accel.data.prepare import TextWriter, plan_of, prepare, prepare_sources, prepare_text
from gpt2_accel.data.shards import TokenStream, read_manifest
from gpt2_accel.data.source import open_data, verify_data
from gpt2_accel.data.sources import ChangedSource, corpus_files, find_files, is_text, row_files
from gpt2_accel.evals.items import Item
from gpt2_accel.evals.perplexity import TextPerplexity
from gpt2_accel.evals.validation import prepare_loss
from gpt2_accel.tokenizer import byte_tokenizer, char_tokenizer, encode, train_bpe

RECIPE = "recipes/prepare_data.py"


def sources_of(path, column="text"):
    return corpus_files(find_files(path, is_text, "UTF-8 text"), column, None)


def made(sources, data_dir, **options):
    """Prepares sources in bytes; returns the manifest."""
    tokenizer = byte_tokenizer()
    options = {"source": "a corpus", "plan": plan_of(sources, tokenizer), **options}
    return prepare_sources(sources, tokenizer, data_dir, **options)


def documents_in(data_dir, split):
    """Decodes the documents of a byte-level split."""
    stream = TokenStream(data_dir, split)
    tokens = stream.read(0, stream.tokens)
    parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
    return [bytes(part[1:].tolist()).decode() for part in parts]


def everything_in(data_dir):
    return [documents_in(data_dir, split) for split in ("train", "val")]


def json_lines(texts):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))


def write_parquet(path, texts, column="text", **options):
    table = pyarrow.table({column: texts, "id": range(len(texts))})
    pyarrow.parquet.write_table(table, path, **options)


@pytest.fixture
def corpus(tmp_path):
    """A folder of 200 documents as text files and again in each format of rows; the documents."""
    texts = [make_text(10, seed) + "ä" * (seed % 3) for seed in range(200)]
    texts[:2] = ["NA", '"quoted", and\n a\ttab\r\n']
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for i, text in enumerate(texts):
        suffix = ("txt", "md", "txt.gz")[i % 3]
        data = gzip.compress(text.encode()) if ".gz" in suffix else text.encode()
        (folder / f"sub/{i:03d}.{suffix}").write_bytes(data)
    (folder / "a.jsonl").write_text(json_lines(texts))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(texts).encode()))
    with pyarrow.output_stream(str(folder / "c.jsonl.zst"), compression="zstd") as file:
        file.write(json_lines(texts).encode())
    write_parquet(folder / "d.parquet", texts, row_group_size=16)
    (folder / "e.JSON").write_text(json.dumps([{"text": text} for text in texts]))
    (folder / "f.json.GZ").write_bytes(gzip.compress(json_lines(texts).encode()))
    (folder / "g.ndjson.bz2").write_bytes(bz2.compress(json_lines(texts).encode()))
    with open(folder / "h.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["text", "id"], *([text, i] for i, text in enumerate(texts))])
    Dataset.from_dict({"text": texts}).save_to_disk(folder / "i", num_shards=2)
    return folder, texts


# Cutting


@given(
    st.text(alphabet=st.sampled_from("ab1'st .,\n\tä漢\u00a0"), max_size=300), st.integers(2, 40)
)
@settings(deadline=None, max_examples=300)
def test_chunks_have_the_same_tokens_as_the_whole_text(bpe, text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK", size)
        parts = list(chunks([text[:100], text[100:]]))
    assert "".join(parts) == text
    assert all(len(part) < 3 * size for part in parts)  # also of a text without spaces
    if all(re.match(r"\w[ \n]", one[-1] + two[0]) for one, two in itertools.pairwise(parts)):
        assert [i for part in parts for i in encode(bpe, [part])[0]] == encode(bpe, [text])[0]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([make_text(300, 0), "a b. c, it's 11 \n\n ab  a\t'st"] * 20, 330)


# Files and folders


def test_all_formats_give_the_same_documents_with_any_shards_and_threads(
    corpus, tmp_path, monkeypatch
):
    folder, texts = corpus
    sources = sources_of(folder)
    made(sources, tmp_path / "one")
    monkeypatch.setattr("gpt2_accel.data.prepare.GROUP", 1000)  # many groups for the threads
    manifest = made(sources, tmp_path / "many", workers=3, shard_tokens=500)
    assert len(manifest["splits"]["train"]["shards"]) > 40

    train, val = everything_in(tmp_path / "many")
    assert [train, val] == everything_in(tmp_path / "one")
    assert sorted(train + val) == sorted(texts * 10)
    assert 30 < len(val) < 150
    # Equal rows share a split, in every format.
    rows = [text for text in texts if split_of(text) == "val"]
    assert all(val.count(text) in (9, 10) for text in rows)
    assert len(val) <= 9 * len(rows) + 20


def test_only_the_text_files_of_a_folder_are_prepared(tmp_path, capsys):
    folder = tmp_path / "mine"
    (folder / ".git").mkdir(parents=True)
    for name in ("handbook.md", "code.py", "LICENSE", ".hidden.txt", ".git/config"):
        (folder / name).write_text(f"text of {name}. " * 50)
    (folder / "cat.png").write_bytes(bytes(range(256)))
    (folder / "old.txt").write_bytes("Äpfel und Öl".encode("latin1"))
    (folder / "linked").symlink_to(tmp_path)
    (folder / "broken.txt").symlink_to("nowhere")
    (folder / "table.tsv").write_text("text\na\n")
    args = ("text", folder, "--tokenizer", "bytes", "--workers", 1, "--data_dir", tmp_path / "d")
    run_recipe("prepare_data", *args)
    assert "took 3 files; left out 5" in capsys.readouterr().err
    with FileLock(tmp_path / ".d.lock"), refused("another process"):
        run_recipe("prepare_data", *args)
    begins = [text.split(". ")[0] for text in documents_in(tmp_path / "d", "train")]
    assert begins == ["text of LICENSE", "text of code.py", "text of handbook.md"]


def test_empty_rows_are_left_out_and_lone_surrogates_replaced(tmp_path):
    lines = """\ufeff{"text": ""}
{"text": null}
{"text": "é"}
{"text": "\\ud800!"}
{"text": "\\ud83d\\ude00"}
{"text": "a <|endoftext|> b"}

"""
    (tmp_path / "a.jsonl").write_text(lines + json_lines(["long " * 1000]))
    (tmp_path / "b.txt").write_text("\ufeffü ä" + " and more" * 999)
    made(sources_of(tmp_path), tmp_path / "d")
    texts = documents_in(tmp_path / "d", "train")
    assert texts[0].startswith("ü ä and more")
    assert {"é", "\ufffd!", "\U0001f600", "a <|endoftext|> b"} < set(texts)
    assert "" not in texts


def test_a_corpus_without_text_for_a_split_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines(["hello world"] * 300))
    with refused("the split 'val'"):
        made(sources_of(tmp_path), tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_folders_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    (tmp_path / "set/locked").mkdir(parents=True)
    for name in ("a.jsonl", "locked/b.jsonl"):
        (tmp_path / "set" / name).write_text(json_lines(["text"]))
    scandir = os.scandir

    def denied(path="."):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)  # root may read every folder
    with refused("set/locked"):
        sources_of(tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


# Held-out documents


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json"])
def test_few_documents_hold_out_their_last_parts(tmp_path, suffix):
    texts = [make_text(count, count) for count in (300, 100, 3000)]
    for i, text in enumerate(texts):
        rows = {"jsonl": json_lines([text]), "json": json.dumps({"text": text}, indent=2)}
        (tmp_path / f"{i}.{suffix}").write_text(rows.get(suffix, text))
    made(sources_of(tmp_path), tmp_path / "d")
    train, val = everything_in(tmp_path / "d")
    assert [first + last for first, last in zip(train, val, strict=True)] == texts
    assert 0.02 < len("".join(val)) / len("".join(texts)) < 0.08


def test_the_first_documents_may_be_for_validation(corpus, tmp_path):
    """As of fineweb-edu. The last document of the split is complete."""
    texts = [f"{i} {text}" for i in range(20) for text in corpus[1]]
    write_parquet(tmp_path / "rows.parquet", texts)
    sources = row_files([str(tmp_path / "rows.parquet")], "text", one_in=2000)
    options = {"shard_tokens": 50_000, "workers": 2, "validation_tokens": 50_000}
    splits = made(sources, tmp_path / "d", **options)["splits"]
    train, val = everything_in(tmp_path / "d")
    assert val + train == texts
    assert verify_data(tmp_path / "d") > 3
    for name, texts in (("train", train), ("val", val)):
        assert splits[name]["documents"] == len(texts)
        assert splits[name]["bytes"] == len("".join(texts).encode())
    last = len(val[-1].encode()) + 1
    assert splits["val"]["tokens"] - last < 50_000 <= splits["val"]["tokens"]


# Separators and text that a tokenizer does not have

STORIES = [f"Story {i}.\n\nThe end <|endoftext|> of {i}\n" for i in range(400)]
SEPARATED = {
    "after": ("".join(f"{story}<|endoftext|>\n" for story in STORIES), [], 400),
    "before, CRLF": ("".join(f"<|endoftext|>\r\n{story}" for story in STORIES), [], 400),
    "no line end": ("<|endoftext|>\n".join(STORIES) + "<|endoftext|>", [], 400),
    "another": ("---\n".join(STORIES), ["--separator=---"], 400),
    "none": ("<|endoftext|>\n".join(STORIES), ["--separator", ""], 2),
}


@pytest.mark.parametrize("name", SEPARATED)
def test_lines_separate_the_documents_of_plain_text(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(documents, "CHUNK", 999)
    monkeypatch.setattr("gpt2_accel.data.sources.CHUNK", 999)
    text, flags, count = SEPARATED[name]
    (tmp_path / "a.txt").write_bytes(text.encode())
    args = ("text", tmp_path / "a.txt", "--tokenizer", "bytes", "--data_dir", tmp_path / "d")
    run_recipe("prepare_data", *args, *flags)
    train, val = everything_in(tmp_path / "d")
    assert len(train + val) == count
    assert "".join(train + val) == ("".join(STORIES) if count == 400 else text)
    assert 0.01 < len("".join(val)) / len(text) < 0.06
    kept = 400 if count == 400 else 799
    assert f"{kept} times <|endoftext|>, kept as ordinary text" in capsys.readouterr().out
    assert read_manifest(tmp_path / "d")["special"] == {"<|endoftext|>": kept}


def letters(**roles):
    """A tokenizer of letters and spaces, whose BPE drops others or has an `unknown` token."""
    tokens = ["</s>", "<unk>", "\n", *sorted({*"".join(WORDS), *" 0123456"})]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token=roles.pop("unknown", None)))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


@pytest.mark.parametrize(
    "tokenizer",
    [
        letters(unknown="</s>", eos_token="</s>", pad_token="</s>", unk_token="</s>"),
        letters(unknown="<unk>", eos_token="</s>"),
        letters(eos_token="</s>"),
    ],
    ids=["eos is unk", "unk without a name", "drops"],
)
def test_lost_characters_are_counted_and_are_not_borders(tmp_path, tokenizer):
    texts = ["cat é sat", "the dog", "😀 ran ZZ"]
    manifest = prepare({"train": texts}, tokenizer, tmp_path / "d", source="a test")
    stream = TokenStream(tmp_path / "d", "train")
    assert np.count_nonzero(stream.read(0, stream.tokens) == 0) == len(texts)
    assert manifest["unknown"] == 4
    config = GPTConfig(len(tokenizer), n_positions=16, n_layer=1, n_head=1, n_embd=8)
    notes = TextPerplexity([Item("a", {"text": texts[0]})], tokenizer, config).notes
    data = open_data(tmp_path / "d")
    note = prepare_loss(Accelerator(), tokenizer, config, data, "train", 64)[1]
    assert "give back 1 characters: bits per byte is not comparable" in notes[1]
    assert "give back 4 characters" in note


# Data sets of the Hub


def hub_content(suffix, folder):
    """Returns the files of a data set of 1,000 rows in two files on the Hub."""
    files = {"README.md": b"# A data set\n"}
    for i in range(2):
        texts = [f"{i} {j} hello" for j in range(500)]
        content = json_lines(texts).encode()
        if suffix == "parquet":
            write_parquet(folder / "part.parquet", texts, row_group_size=100)
            content = (folder / "part.parquet").read_bytes()
        files[f"data/train-{i}.{suffix}"] = gzip.compress(content) if ".gz" in suffix else content
    return files


@long
def test_data_sets_of_the_hub_are_streamed_and_failed_requests_are_repeated(tmp_path):
    def prepared(name, fails=True):
        args = ("hf", name, "--tokenizer", "bytes", "--data_dir", tmp_path / name)
        return python(RECIPE, *args, at_import=at_import, fails=fails, HF_TOKEN=TOKEN)

    with Hub() as hub:
        at_import = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        for suffix in ("parquet", "jsonl", "json.gz"):
            name = f"u/{suffix}"
            sha = "a" * 40
            commits = [(sha, hub_content(suffix, tmp_path))]
            hub.repos[name] = {"private": False, "commits": commits}
            hub.faults = [("GET", f"{sha}/data/train-1.{suffix}", 503)]
            prepared(name, fails=False)
            assert not hub.faults
            assert read_manifest(tmp_path / name)["revision"] == sha
            train, val = everything_in(tmp_path / name)
            expected = sorted(f"{i} {j} hello" for i in range(2) for j in range(500))
            assert sorted(train + val) == expected
            assert val == [text for text in val if split_of(text) == "val"]
            assert 20 < len(val) < 90
        assert "u/m cannot be found on the Hub (404" in prepared("u/m").stderr
    [line] = [text for text in prepared("u/n").stderr.splitlines() if text.strip()]
    assert "u/n cannot be found on the Hub" in line  # the network is gone


# Kills, disks


def test_a_restart_continues_and_a_changed_source_starts_anew(tmp_path, monkeypatch):
    folder = tmp_path / "c"
    read = []
    fails = []
    folder.mkdir()
    for i in range(8):
        texts = [make_text(30, 10 * i + j) for j in range(8)]
        (folder / f"{i}.jsonl").write_text(json_lines(texts))
    (folder / "4.jsonl").unlink()
    (folder / "4.txt").write_text("<|endoftext|>\n".join(texts))
    encode = TextWriter.encode

    def failing(writer, group):
        read.extend(piece.at for piece in group)
        if any(piece.at[0] == 5 for piece in group) and fails:
            raise OSError("No space left on device")
        return encode(writer, group)

    monkeypatch.setattr(TextWriter, "encode", failing)
    monkeypatch.setattr("gpt2_accel.data.prepare.GROUP", 1)

    def prepared(name):
        read.clear()
        return made(sources_of(folder), tmp_path / name, shard_tokens=1000)

    fails.append(True)
    with refused("No space"):
        prepared("d")
    fails.clear()
    prepared("d")
    assert (4, 0) < read[0] < (5, 8)  # within a separated text
    assert read[-1] == (7, 7)
    prepared("d")  # complete already
    assert not read
    prepared("e")
    assert read_manifest(tmp_path / "d") == read_manifest(tmp_path / "e")
    assert read[0] == (0, 0)
    for name in ("4.txt", "0.jsonl"):
        fails.append(True)
        with refused("No space"):
            prepared(name)
        os.utime(folder / name, (1, 1))
        fails.clear()
        prepared(name)
        assert read[0] == (0, 0)
    with refused("exists already"):
        prepared("e")


@pytest.mark.parametrize("name", ["2.jsonl", "0.txt"])
def test_a_file_that_changes_while_it_is_read_ends_the_preparation(tmp_path, monkeypatch, name):
    folder = tmp_path / "c"
    folder.mkdir()
    rows = json_lines(make_text(30, seed) for seed in range(40))
    for other in ("1.jsonl", name):
        (folder / other).write_text(rows)
    encode = TextWriter.encode

    def changing(writer, group):
        if any(name in piece.place for piece in group):
            os.utime(folder / name, (1, 1))
        return encode(writer, group)

    with monkeypatch.context() as patch:
        patch.setattr(TextWriter, "encode", changing)
        patch.setattr("gpt2_accel.data.prepare.GROUP", 1)
        patch.setattr(documents, "CHUNK", 500)
        with pytest.raises(ChangedSource, match=name):
            made(sources_of(folder), tmp_path / "d", shard_tokens=1000)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    made(sources_of(folder), tmp_path / "d")


@pytest.mark.parametrize(
    ("train", "tokenizer"),
    [
        (["one two", "Three"], byte_tokenizer()),
        (["one two"], byte_tokenizer()),
        (["one ", "twothree"], byte_tokenizer()),
        (["one two", "three"], char_tokenizer("one twhrfu")),
    ],
)
def test_prepared_data_is_used_again_for_the_same_texts_and_never_overwritten(
    train, tokenizer, tmp_path
):
    texts = {"train": ["one two", "three"], "val": ["four"]}

    def prepared(splits, tokenizer):
        return prepare(splits, tokenizer, tmp_path / "d", source="made up")

    manifest = prepared(texts, byte_tokenizer())
    written = (tmp_path / "d/train_000000.bin").stat()
    again = {split: iter(own) for split, own in texts.items()}
    assert prepared(again, byte_tokenizer()) == manifest
    with refused("exists already"):
        prepared(texts | {"train": train}, tokenizer)
    assert (tmp_path / "d/train_000000.bin").stat() == written


def test_a_start_that_another_start_overtakes_uses_its_folder(tmp_path):
    text = tmp_path / "text"
    text.write_text("a few words, " * 20)

    def overtaken(words):
        prepare_text(text, tmp_path / "d", char_tokenizer)
        return char_tokenizer(words)

    prepare_text(text, tmp_path / "d", overtaken)
    assert verify_data(tmp_path / "d") == 2


def test_a_bpe_is_trained_on_a_text_with_a_long_line_without_spaces():
    assert len(train_bpe(["x" * 3_000_000, "the cat sat on the mat " * 9], 260)) == 260
