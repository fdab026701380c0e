"""Preparation of text into shards: sources, workers, kills, full disks and wrong inputs."""

import filecmp
import gzip
import json
import os
import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from conftest import LONG, make_text, run_recipe
from filelock import FileLock
from hub_server import TOKEN, Hub
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import Started, ask, python

from gpt2_accel.data import documents, sources
from gpt2_accel.data.data_sets import hub_parts
from gpt2_accel.data.documents import ByHash, LastPart, chunks, held_out
from gpt2_accel.data.prepare import TextWriter, prepare
from gpt2_accel.data.rows import Column, Row, columns, drawn_columns, file_parts, row_parts
from gpt2_accel.data.shards import read_manifest, verify_data
from gpt2_accel.data.sources import read_text, text_files
from gpt2_accel.data.stream import TokenStream
from gpt2_accel.data.workers import plan_of, run_parts
from gpt2_accel.tokenizer import byte_tokenizer, encode, train_bpe

RECIPE = "recipes/prepare_data.py"


def recipe(*args, **env):
    """Runs `prepare_data.py` as a user does."""
    return python(RECIPE, *args, **env)


def parts_of(*paths, column="text", tokens=10**8):
    return file_parts(text_files([str(path) for path in paths])[0], column, tokens)


def made(parts, data_dir, tokenizer=None, writer=TextWriter, **options):
    """Prepares the parts of a corpus in bytes; returns the manifest."""
    tokenizer = tokenizer or byte_tokenizer()
    options = {"source": "a corpus", "plan": plan_of(parts, tokenizer), **options}
    return run_parts(parts, writer(tokenizer, "a corpus"), tokenizer, data_dir, **options)


def documents_in(data_dir, split):
    """Decodes the documents of a byte-level split."""
    stream = TokenStream(data_dir, split)
    tokens = stream.read(0, stream.tokens)
    parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
    return [bytes(part[1:].tolist()).decode() for part in parts]


def everything_in(data_dir):
    return [documents_in(data_dir, split) for split in ("train", "val")]


def same(one, other):
    """Whether two folders hold the same files with equal bytes."""
    found = [
        sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
        for folder in (one, other)
    ]
    return found[0] == found[1] and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in found[0]
    )


def json_lines(texts, column="text"):
    return "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts))


@pytest.fixture
def corpus(tmp_path):
    """A folder with 200 documents as text files, and the same again in each format of rows; and the documents."""
    texts = [make_text(10, seed) + "ä" * (seed % 3) for seed in range(200)]
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / f"sub/{i:03d}.{('txt', 'md', 'py')[i % 3]}").write_text(text)
    (folder / "a.jsonl").write_text(json_lines(texts))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(json_lines(texts))
    with pyarrow.output_stream(str(folder / "c.jsonl.zst"), compression="zstd") as file:
        file.write(json_lines(texts).encode())
    table = pyarrow.table({"text": texts, "id": range(len(texts))})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=16)
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
    assert [i for part in parts for i in encode(bpe, [part])[0]] == encode(bpe, [text])[0]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([make_text(300, 0), "a b. c, it's 11 \n\n ab  a\t'st"] * 20, 330)


def test_a_text_without_word_boundaries_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK", 1000)
    monkeypatch.setattr(documents, "LONGEST_WORD", 5000)
    monkeypatch.setattr(sources, "SMALLEST_PART", 5000)
    parts = list(chunks(["x" * 20_000, " y" * 500]))
    assert "".join(parts) == "x" * 20_000 + " y" * 500 and max(map(len, parts)) <= 6000
    text = "漢字" * 9000 + "。"
    for name, content in (("a.txt", text), ("a.jsonl", json_lines([text]))):
        (tmp_path / name).write_text(content)
        found = parts_of(tmp_path / name)
        made(found, tmp_path / f"of {name}")
        [train], [val] = everything_in(tmp_path / f"of {name}")
        assert train + val == text and 0.03 < len(val) / len(text) < 0.07
        assert len(found) > 3 or name == "a.jsonl"


# Files and folders


def test_all_file_formats_give_the_same_documents_with_any_size_of_parts(corpus, tmp_path):
    folder, texts = corpus
    for tokens in (10**8, 200):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "SMALLEST_PART", 100)
            parts = parts_of(folder, tokens=tokens)
        manifest = made(parts, tmp_path / str(tokens), workers=2 if tokens == 200 else 1)
    assert 40 < len(manifest["splits"]["train"]["shards"]) <= len(parts)
    assert everything_in(tmp_path / "200") == everything_in(tmp_path / f"{10**8}")
    train, val = everything_in(tmp_path / "200")
    assert sorted(train + val) == sorted(texts * 5) and 20 < len(val) < 90
    # Equal rows share a split, in every format.
    rows = [text for text in texts if held_out(text)]
    assert all(val.count(text) in (4, 5) for text in rows) and len(val) <= 4 * len(rows) + 20


def test_a_folder_of_text_means_its_text(tmp_path):
    folder = tmp_path / "mine"
    (folder / ".git").mkdir(parents=True)
    for name in ("handbook.md", "code.py", "LICENSE", ".hidden.txt", ".git/config"):
        (folder / name).write_text(f"text of {name}. " * 50)
    (folder / "cat.png").write_bytes(bytes(range(256)))
    (folder / "dog.png").write_bytes(bytes(range(256)))
    (folder / "old.txt").write_bytes("Äpfel und Öl".encode("latin1"))
    (folder / "paper.pdf").write_bytes(b"%PDF-1.4\n1 0 obj\0")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "stray.txt").write_bytes(b"text of stray.txt. \xe9 " + b"plain text. " * 900)
    args = ("text", folder, "--tokenizer", "bytes", "--workers", 1, "--data_dir", tmp_path / "d")
    done = recipe(*args)
    assert (
        f"{folder}: took 1 .md, 1 .py, 1 .txt, 1 without a suffix; left out 2 .png, 1 .pdf, binary, the first: cat.png; "
        "left out 1 without a suffix, a link to a folder or to nothing, the first: linked; "
        "left out 1 .txt, not UTF-8, the first: old.txt"
    ) in done.stderr.replace("1 .pdf, 2 .png", "2 .png, 1 .pdf")
    assert "1 bytes that are not UTF-8" in done.stdout
    assert recipe(*args).returncode == 0  # complete already
    lock = FileLock(tmp_path / ".d.lock")
    with lock, pytest.raises(OSError, match=f"another process is preparing {tmp_path}/d: wait"):
        run_recipe("prepare_data", *args)
    train = documents_in(tmp_path / "d", "train")
    assert [text.split(". ")[0] for text in train] == [
        f"text of {n}" for n in ("LICENSE", "code.py", "handbook.md", "stray.txt")
    ]
    pictures = ("--pattern", "*.png", "--data_dir", tmp_path / "e")
    with pytest.raises(FileNotFoundError, match="took no file; left out 2 .png, binary"):
        run_recipe("prepare_data", "text", folder, *pictures)


def test_invalid_bytes_separators_and_empty_documents_are_counted(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    lines = [
        b'{"text": ""}',
        b'{"text": null}',
        '{"text": "é caf'.encode() + b'\xe9"}',
        b'{"text": "\\ud800!"}',
        b'{"text": "a <|endoftext|> b"}',
        b"",
        b'{"text": "' + b"long " * 1000 + b'"}',
    ]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b.txt").write_bytes("ü ä ö Z".encode() + b"\xfcrich and more " * 3)
    parts = parts_of(folder)
    manifest = made(parts, tmp_path / "d", writer=lambda *args: TextWriter(*args, ("train",)))
    assert manifest["counts"] == {"empty": 2, "not_utf8": 5, "literal_separator": 1}
    assert manifest["first_not_utf8"] == str(folder / "b.txt")
    found = documents_in(tmp_path / "d", "train")
    assert found[0].startswith("ü ä ö Z\ufffdrich and more")
    for text in ("é caf\ufffd", "\ufffd!", "a <|endoftext|> b"):
        assert text in found
    assert any("long " * 900 in text for text in found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', "has no column 'text': give --column body"),
        ('{"messages": []}', "has no column 'text': they are conversations, .* chat"),
        ("{", "not valid JSON"),
        ('["x"]', "a value of type list, not an object"),
        ('{"text": 0}', "a value of type int in 'text', not a text"),
        # Inductor raises Python's limit to 2,000 in a process in which it compiles.
        ("[" * 10**5, "nested too deeply"),
    ],
)
def test_a_wrong_json_line_is_named_with_its_number(tmp_path, monkeypatch, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=f"a.jsonl, line 2, .*{message}"):
        parts_of(tmp_path)


def test_a_worker_process_raises_the_same_error_for_a_wrong_line(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 2100 + '{"body": "x"}\n')
    monkeypatch.setattr(sources, "SMALLEST_PART", 10_000)
    with pytest.raises(ValueError, match="a.jsonl, line 2,101, has no column") as caught:
        made(parts_of(tmp_path), tmp_path / "d", workers=2)
    assert "gpt2_accel" in str(caught.traceback[-1].path)  # so `cli.run` prints one sentence


WRONG = {
    "gzip.jsonl.gz": (b'{"text": "fine"}\n', "cannot be read .*incorrect header"),
    "cut.jsonl.gz": (
        gzip.compress(random.Random(0).randbytes(9**5))[:9999],
        "cannot be read|UTF-8|JSON",
    ),
    "flipped.parquet": (b"PAR1" + bytes(99) + b"PAR1", "cannot be read"),
    "latin1.txt": ("Äpfel und Öl".encode("latin1"), "is not UTF-8: convert it"),
    "utf16.txt": ("text".encode("utf-16"), "is binary"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_of_another_format_is_refused_before_any_work(tmp_path, name):
    content, message = WRONG[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*({message})") as caught:
        parts_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_wrong_column_of_parquet_is_named_with_its_file(tmp_path):
    for name, values in (("a", ["text"]), ("b", [1, 2])):
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match="b.parquet, row 0, has a value of type int in 'text'"):
        parts_of(tmp_path)
    with pytest.raises(ValueError, match="a.parquet has no column 'body': give --column text"):
        parts_of(tmp_path, column="body")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_byte_order_mark_is_skipped(tmp_path, name):
    text = "text of it" if name == "a.txt" else '{"text": "text of it"}\n'
    write = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(write(text.encode("utf-8-sig")))
    [part] = parts_of(tmp_path)
    document = next(part.documents())
    assert "text of it".startswith("".join(document.chunks))
    (tmp_path / "b.txt").write_bytes("text".encode("utf-8-sig"))
    assert read_text(tmp_path / "b.txt") == "text"


# Held-out documents


HELD_OUT = next(i for i in range(100) if held_out(f"{i}.txt"))


@pytest.mark.parametrize("words", [[400], [300] * 3, [20] * HELD_OUT + [3000]])
def test_few_texts_hold_out_their_last_parts(tmp_path, words):
    for i, count in enumerate(words):
        (tmp_path / f"{i}.txt").write_text(make_text(count, i))
    manifest = made(parts_of(tmp_path), tmp_path / "d")
    train, val = (manifest["splits"][split] for split in ("train", "val"))
    assert train["documents"] == len(words)
    assert 0.02 < val["tokens"] / (train["tokens"] + val["tokens"]) < 0.08
    for document in documents_in(tmp_path / "d", "val"):
        assert any(path.read_text().endswith(document) for path in tmp_path.glob("*.txt"))


def test_a_single_text_is_split_once_and_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALLEST_PART", 1000)
    (tmp_path / "book.txt").write_text(make_text(5000, 3))
    manifest = made(parts_of(tmp_path / "book.txt"), tmp_path / "d", workers=2)
    [train], [val] = everything_in(tmp_path / "d")
    assert train + val == (tmp_path / "book.txt").read_text()
    assert len(val) == pytest.approx(0.05 * len(train), rel=0.1)
    assert len(manifest["splits"]["train"]["shards"]) > 10
    assert manifest["splits"]["train"]["documents"] == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_few_rows_hold_out_their_last_parts(tmp_path, name):
    texts = [make_text(100, seed) for seed in range(3)]
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name)
    else:
        (tmp_path / name).write_text(json_lines(texts))
    parts = parts_of(tmp_path)
    made(parts, tmp_path / "d")
    train, val = everything_in(tmp_path / "d")
    assert [first + last for first, last in zip(train, val, strict=True)] == texts
    assert 0.02 < len("".join(val)) / len("".join(texts)) < 0.08
    for rows, rule in (
        ([{"text": f"{i} text"} for i in range(500)], ByHash()),
        ([{"text": "x" * 9**5}, {"text": "y"}], LastPart()),
    ):
        [found] = columns([Rows(rows)], "text")
        assert found.rule == rule


class Rows(list):
    """A part of rows in memory."""

    def rows(self):
        return (Row(value, "a row") for value in self)


def test_held_out_rows_equal_those_of_train_test_split(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"row": [str(i) for i in range(20_001)]})
    drawn = rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True)["test"]["row"]
    for name, part in (("a", range(15_000)), ("b", range(15_000, 20_001))):
        table = pyarrow.table({"row": [str(i) for i in part]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4000)
    parts = row_parts([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], 1, "row")
    found = [d for p in drawn_columns(parts, "row", 0.0005, 2357) for d in p.documents()]
    assert len(parts) > 4 and len(found) == 20_001
    assert sorted(drawn) == sorted("".join(d.chunks) for d in found if d.split == "val")


def test_splits_of_openwebtext_and_fineweb_edu(corpus, tmp_path):
    texts, source = corpus[1], tmp_path / "set"
    source.mkdir()
    for i in range(2):
        part = pyarrow.table({"text": [f"{i} {text}" for text in texts * 10]})
        pyarrow.parquet.write_table(part, source / f"train-{i}.parquet", row_group_size=100)
    everything = [f"{i} {text}" for i in range(2) for text in texts * 10]
    common = ("--tokenizer", "bytes", "--data_dir")
    owt = recipe("openwebtext", source, "--data_files", "*.parquet", *common, tmp_path / "o")
    assert "val: 2 documents" in owt.stdout, owt.stderr
    rows = np.random.default_rng(2357).permutation(4000)[:2]
    assert documents_in(tmp_path / "o", "val") == [everything[row] for row in sorted(rows)]

    edu = ("fineweb-edu", source, "--config", "default", *common)
    done = recipe(*edu, tmp_path / "e", "--shard_tokens", 50_000)
    assert done.returncode == 0, done.stderr
    splits = read_manifest(tmp_path / "e")["splits"]
    assert splits["val"]["tokens"] == 50_000 and len(splits["val"]["shards"]) == 1
    val, train = (TokenStream(tmp_path / "e", split) for split in ("val", "train"))
    expected = [token for text in everything for token in (256, *text.encode())]
    assert [*val.read(0, 50_000), *train.read(0, train.tokens)] == expected
    assert splits["val"]["bytes"] == 50_000 - expected[:50_000].count(256)
    assert splits["val"]["bytes"] + splits["train"]["bytes"] == len("".join(everything).encode())
    assert splits["train"]["documents"] == expected[50_000:].count(256)
    assert verify_data(tmp_path / "e") == len(list((tmp_path / "e").glob("*.bin")))
    done = recipe(*edu, tmp_path / "f", "--shard_tokens", 10**6)
    assert "no text for the split 'train': add documents, or lower --shard_tokens" in done.stderr


# Data sets of `datasets`


def test_a_local_data_set_is_divided_and_its_changes_are_noticed(
    corpus, tmp_path, monkeypatch, capsys
):
    folder, texts = corpus
    monkeypatch.setattr(sources, "SMALLEST_PART", 100)
    for kind, name in (("parquet", "d.parquet"), ("json", "a.jsonl")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).write_bytes((folder / name).read_bytes())
        rows, revision = hub_parts(str(tmp_path / kind), shard_tokens=200, column="text")
        assert revision is None and len(rows) > 3
        made(
            [Column(part, "text", ByHash()) for part in rows], tmp_path / f"{kind}-made", workers=2
        )
        train, val = everything_in(tmp_path / f"{kind}-made")
        assert sorted(train + val) == sorted(texts) and 4 < len(val) < 25
        os.utime(tmp_path / kind / name)
        changed, _ = hub_parts(str(tmp_path / kind), shard_tokens=200, column="text")
        assert list(map(repr, changed)) != list(map(repr, rows))
    with pytest.raises(ValueError, match="no column 'body': give --column text or --column id"):
        hub_parts(str(tmp_path / "parquet"), shard_tokens=200, column="body")
    with pytest.raises(ValueError, match="no split 'test', only train"):
        hub_parts(str(tmp_path / "parquet"), shard_tokens=200, split="test")


def hub_files(suffix, folder):
    """Returns the files of a data set of 1,000 rows in two files on the Hub."""
    files = {"README.md": b"# A data set\n"}
    for i in range(2):
        texts = [f"{i} {j} hello" for j in range(500)]
        content = json_lines(texts).encode()
        if suffix == "parquet":
            table = pyarrow.table({"text": texts, "id": range(500)})
            pyarrow.parquet.write_table(table, folder / "part.parquet", row_group_size=100)
            content = (folder / "part.parquet").read_bytes()
        files[f"data/train-{i}.{suffix}"] = gzip.compress(content) if ".gz" in suffix else content
    return files


def test_data_sets_of_the_hub_are_streamed_and_retried_and_a_missing_network_is_reported(tmp_path):
    def prepared(name):
        args = ("hf", name, "--tokenizer", "bytes", "--data_dir", tmp_path / name)
        return python(RECIPE, *args, at_import=at_import, HF_TOKEN=TOKEN)

    with Hub() as hub:
        at_import = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        for suffix in ("parquet", "jsonl", "json.gz"):
            name, sha = f"u/{suffix}", "a" * 40
            commits = [(sha, hub_files(suffix, tmp_path))]
            hub.repos[name] = {"private": False, "commits": commits}
            hub.faults = [("GET", f"{sha}/data/train-1.{suffix}", 503)]
            done = prepared(name)
            assert done.returncode == 0 and not hub.faults, done.stderr
            assert read_manifest(tmp_path / name)["revision"] == sha
            train, val = everything_in(tmp_path / name)
            expected = sorted(f"{i} {j} hello" for i in range(2) for j in range(500))
            assert sorted(train + val) == expected
            assert val == [text for text in val if held_out(text)] and 20 < len(val) < 90
        assert "the data set u/m cannot be found on the Hub (404" in prepared("u/m").stderr
    begun = time.monotonic()
    done = prepared("nobody/nothing")
    assert time.monotonic() - begun < 22  # the libraries' own retries take 24
    [line] = [text for text in done.stderr.splitlines() if text.strip()]
    assert done.returncode == 1 and "the data set nobody/nothing cannot be found on the Hub" in line


# Workers, kills, disks


def started_by(process: psutil.Process) -> str | None:
    """The `STARTED_BY` of a process's environment, None if it cannot be read."""
    with suppress(psutil.Error):
        return process.environ().get("STARTED_BY")


def test_a_killed_preparation_resumes_to_the_same_shards(tmp_path, times, report):
    folder = tmp_path / "c"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.jsonl").write_text(
            json_lines(make_text(200, 1000 * i + j) for j in range(1500))
        )
    args = ("text", folder, "--tokenizer", "bytes", "--shard_tokens", 100_000, "--workers", 2)
    ask({"poll": []})  # starts the fork server, so that `duration` is that of the recipe
    begun = time.monotonic()
    whole = recipe(*args, "--data_dir", tmp_path / "whole" / "d")
    assert whole.returncode == 0, whole.stderr
    duration = time.monotonic() - begun
    rng, tries, killed = random.Random(0), times(1, 10), 0
    for i in range(tries):
        target = tmp_path / f"try{i}" / "d"
        while True:
            process = Started(
                *(RECIPE, *args, "--data_dir", target),
                log=tmp_path / "log",
                STARTED_BY=str(tmp_path),
            )
            try:
                once = killed > i
                assert process.wait(*() if once else (rng.uniform(0.3, 1.0) * duration,)) == 0
                break
            except subprocess.TimeoutExpired:  # `wait` has killed it
                process.wait()
                killed += 1
        made, expected = (read_manifest(path) for path in (target, tmp_path / "whole/d"))
        made["command"] = expected["command"]
        assert made == expected
        names = {path.name for path in (tmp_path / "whole/d").glob("*.bin")}
        assert names == {path.name for path in target.glob("*.bin")} and len(names) > 8
        for name in names:
            assert filecmp.cmp(target / name, tmp_path / "whole/d" / name, shallow=False)
        assert [path.name for path in target.parent.iterdir()] == ["d"]
    assert killed >= 1 or not LONG
    deadline = time.monotonic() + 20
    while left := [p for p in psutil.process_iter() if started_by(p) == str(tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    report("SIGKILL at a random time while data is prepared", killed, killed, "unfinished shards")


class Counted(TextWriter):
    """Notes the numbers of the parts that it writes, and fails at those in `fails`."""

    tried: list[int]
    fails = ()

    def write(self, folder, number, part):
        Counted.tried.append(number)
        if number in Counted.fails:
            raise OSError("No space left on device")
        return super().write(folder, number, part)


def test_a_restart_does_what_is_missing_and_a_changed_source_starts_anew(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sources, "SMALLEST_PART", 2000)
    folder = tmp_path / "c"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.jsonl").write_text(json_lines(make_text(30, 10 * i + j) for j in range(8)))
    monkeypatch.setattr(Counted, "tried", [], raising=False)
    monkeypatch.setattr(Counted, "fails", (5,))
    with pytest.raises(OSError, match="No space"):
        made(parts_of(folder), tmp_path / "d", writer=Counted)
    monkeypatch.setattr(Counted, "fails", ())
    made(parts_of(folder), tmp_path / "d", writer=Counted)
    made(parts_of(folder), tmp_path / "d", writer=Counted)  # complete already
    parts = len(parts_of(folder))
    assert Counted.tried == [*range(6), *range(5, parts)] and parts >= 8
    made(parts_of(folder), tmp_path / "e")
    assert same(tmp_path / "d", tmp_path / "e")
    assert "anew" not in capsys.readouterr().err

    monkeypatch.setattr(Counted, "fails", (5,))
    with pytest.raises(OSError, match="No space"):
        made(parts_of(folder), tmp_path / "f", writer=Counted)
    (folder / "0.jsonl").write_text(json_lines([make_text(100, 999)] * 8))
    Counted.tried.clear()
    monkeypatch.setattr(Counted, "fails", ())
    made(parts_of(folder), tmp_path / "f", writer=Counted)
    assert Counted.tried == list(range(len(parts_of(folder))))
    assert "the source, the tokenizer or the options have changed" in capsys.readouterr().err
    made(parts_of(folder), tmp_path / "g")
    assert same(tmp_path / "f", tmp_path / "g")
    with pytest.raises(FileExistsError, match="exists already, and not from the same files"):
        made(parts_of(folder), tmp_path / "e")


def test_a_full_disk_leaves_no_partial_shards(corpus, tmp_path, small_disk, monkeypatch):
    disk = small_disk(1)
    monkeypatch.setattr(sources, "SMALLEST_PART", 5000)
    parts = parts_of(corpus[0])
    (disk / "filler").write_bytes(bytes(2**20 - 40 * 4096))
    with pytest.raises(OSError, match="No space left"):
        made(parts, disk / "d")
    assert not (disk / "d").exists()
    (disk / "filler").unlink()
    made(parts, disk / "d")
    made(parts, tmp_path / "d")
    assert same(disk / "d", tmp_path / "d")


def test_the_folder_is_synced_to_disk_before_it_gets_its_name(corpus, tmp_path, monkeypatch):
    synced, rename, checked = set(), Path.rename, []
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))

    def check(self, target):
        if target == tmp_path / "data":
            checked.append({path.stat().st_ino for path in (self, *self.rglob("*"))} <= synced)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", check)
    made(parts_of(corpus[0]), tmp_path / "data")
    assert checked == [True]
    assert tmp_path.stat().st_ino in synced  # the name too


def test_a_folder_is_shown_and_verified(tmp_path):
    splits = {"train": ["one two", "three " * 100], "val": ["four"]}
    prepare(splits, byte_tokenizer(), tmp_path / "d", source="made up")
    assert "all 2 shards are intact" in recipe("--verify", "--data_dir", tmp_path / "d").stdout
    done = recipe("--data_dir", tmp_path / "d")
    assert "train: 2 documents, 609 tokens (99.2%), 607 bytes" in done.stdout
    assert "train begins with '<|endoftext|>one two<|endoftext|>three three" in done.stdout
    path = tmp_path / "d/train_000000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    done = recipe("--verify", "--data_dir", tmp_path / "d")
    assert "train_000000.bin does not match its checksum" in done.stderr and done.returncode == 1
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="train_000000.bin is not the shard that the manifest"):
        TokenStream(tmp_path / "d", "train")
