"""Preparation of text into shards: sources, workers, kills, full disks and wrong inputs."""

import filecmp
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from conftest import LONG, make_text
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT, Started, ask, python

from gpt2_accel.data import documents, sources, tokenizing
from gpt2_accel.data import prepare as prepare_module
from gpt2_accel.data.documents import ByHash, Drawn, chunks, held_out, piece_size
from gpt2_accel.data.hub import StreamPiece, hub_pieces
from gpt2_accel.data.plan import Plan
from gpt2_accel.data.prepare import prepare, run_plan
from gpt2_accel.data.shards import TokenStream, read_manifest, verify_data
from gpt2_accel.data.sources import Texts, file_pieces, one_text_pieces, pieces_of, text_files
from gpt2_accel.files import lock_folder
from gpt2_accel.tokenizer import byte_tokenizer, encode, token_encoder, train_bpe

RECIPE = "recipes/prepare_data.py"


def recipe(*args, **env):
    """Runs `prepare_data.py` as a user does."""
    return python(RECIPE, *args, **env)


def names_of(folder):
    return {path: path.relative_to(folder).as_posix() for path in text_files(folder)}


def plan(pieces, data_dir, tokenizer=None, **settings):
    return Plan(pieces, tokenizer or byte_tokenizer(), data_dir, "made up", **settings)


def same(one, other):
    """Whether two folders hold the same files with equal bytes."""
    found = [
        sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
        for folder in (one, other)
    ]
    return found[0] == found[1] and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in found[0]
    )


def documents_in(data_dir, split):
    """Decodes the documents of a byte-level split."""
    stream = TokenStream(data_dir, split)
    tokens = stream.read(0, stream.tokens)
    parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
    return [bytes(part[1:].tolist()).decode() for part in parts]


@pytest.fixture
def corpus(tmp_path):
    """A folder with the same 200 documents in each file format, and the documents."""
    texts = [make_text(10, seed) + "ä" * (seed % 3) for seed in range(200)]
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / f"sub/{i:03d}.txt").write_text(text)
    (folder / "a.jsonl").write_text(lines)
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    with pyarrow.output_stream(str(folder / "c.jsonl.zst"), compression="zstd") as file:
        file.write(lines.encode())
    table = pyarrow.table({"text": texts, "id": range(len(texts))})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=16)
    (folder / "notes.md").write_text("not a document")
    return folder, texts


# Cutting


@given(
    st.text(alphabet=st.sampled_from("ab1'st .,\n\tä漢\u00a0"), max_size=300), st.integers(2, 40)
)
@settings(deadline=None, max_examples=300)
def test_chunks_have_the_same_tokens_as_the_whole_text(bpe, text, size):
    old, documents.CHUNK = documents.CHUNK, size
    try:
        parts = list(chunks([text[:100], text[100:]]))
    finally:
        documents.CHUNK = old
    assert "".join(parts) == text
    assert [i for part in parts for i in encode(bpe, [part])[0]] == encode(bpe, [text])[0]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([make_text(300, 0), "a b. c, it's 11 \n\n ab  a\t'st"] * 20, 330)


def test_a_long_text_without_word_boundaries_is_chunked(monkeypatch):
    monkeypatch.setattr(documents, "CHUNK", 1000)
    monkeypatch.setattr(documents, "LONGEST_WORD", 5000)
    parts = list(chunks(["x" * 20_000, " y" * 500]))
    assert "".join(parts) == "x" * 20_000 + " y" * 500
    assert max(map(len, parts)) <= 6000


def test_tiktoken_and_the_hf_tokenizer_give_the_same_ids(gpt2):
    encoder = token_encoder(gpt2)
    for text in ("", "Hello  world\n\n <|endoftext|> it's 3.14 漢字 é\u00a0x   ", make_text(50, 1)):
        assert encoder(text).tolist() == encode(gpt2, [text])[0]


# Sources


def test_all_file_formats_give_the_same_documents_with_any_piece_size(corpus, tmp_path):
    folder, texts = corpus
    made = []
    for piece_bytes in (2**20, 900):
        pieces = file_pieces(names_of(folder), piece_bytes=piece_bytes)
        made.append(tmp_path / str(piece_bytes))
        run_plan(plan(pieces, made[-1], shard_tokens=10_000))
    assert len(pieces) > 30
    for split in ("train", "val"):
        one, other = (documents_in(data_dir, split) for data_dir in made)
        assert one == other
    train, val = (documents_in(made[0], split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts * 5)
    assert 20 < len(val) < 90
    entries = read_manifest(made[0])["splits"]["train"]["shards"]
    assert {entry["tokens"] for entry in entries[:-1]} == {10_000}
    assert sum(entry["documents"] for entry in entries) == len(train)


def test_pieces_follow_the_size_of_the_corpus(tmp_path):
    assert [piece_size(size) for size in (0, 10**6, 10**8)] == [2**20] * 3
    assert piece_size(10**9) == 2**22 and piece_size(10**12) == 2**27
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 4_000_000)
    assert len(file_pieces({path: "a"})) == 20
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "word"}\n' * 10**6)
    assert len(file_pieces({tmp_path / "a.jsonl": "a"})) == 17
    # A small correction of a large corpus keeps the pieces.
    assert piece_size(5 * 10**9) == piece_size(5 * 10**9 + 1000)


def test_a_document_of_several_pieces_is_counted_once(tmp_path):
    for name, text in (("a", "fine "), ("b", "<|endoftext|> Z\udcfcäää x "), ("c", "fine ")):
        (tmp_path / f"{name}.txt").write_text(text * 3000, errors="surrogateescape")
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    made = []
    for piece_bytes in (2**20, 5000):
        pieces = pieces_of(names_of(tmp_path), ByHash(), "text", piece_bytes)
        made.append(run_plan(plan(pieces, tmp_path / str(piece_bytes), splits=())))
    assert len(pieces) == 22
    one, other = ({**manifest, "plan": None} for manifest in made)
    assert one == other
    expected = {"empty": 1, "not_utf8": 1, "literal_separator": 1, "longest": 3000 * 27}
    assert one["counts"] == expected and one["first_not_utf8"] == str(tmp_path / "b.txt")


@pytest.mark.parametrize("finished", [True, False])
def test_data_and_work_of_release_0_2_are_recognized(tmp_path, monkeypatch, finished):
    """Release 0.2 made pieces of 128 MiB of any corpus."""
    for name in "ab":
        lines = "".join(json.dumps({"text": make_text(100, i)}) + "\n" for i in range(2500))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    pieces = file_pieces(names_of(tmp_path), piece_bytes=2**27)
    former = plan(pieces, tmp_path / "d")
    if finished:
        run_plan(former)
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(tokenizing.PieceWriter, "write", stops_at(1, tokenizing.PieceWriter))
            run_plan(former)
        record = tokenizing.record_path(former.work, 0)
        content = json.loads(record.read_text())
        del content["last"], content["rest"]
        record.write_text(json.dumps(content))
    args = ("text", tmp_path, "--tokenizer", "bytes", "--data_dir")
    for target in (tmp_path / "d", tmp_path / "e"):
        done = recipe(*args, target, "--workers", 1)
        assert done.returncode == 0, done.stderr
    resumed, afresh = (read_manifest(tmp_path / name) for name in "de")
    assert resumed["plan"] == former.hash != afresh["plan"]
    assert resumed["splits"] == afresh["splits"] and resumed["counts"] == afresh["counts"]


def stops_at(number, writer):
    """`writer.write`, interrupted before piece `number`."""
    write = writer.write

    def stopping(self, at, *rest):
        if at == number:
            raise KeyboardInterrupt
        write(self, at, *rest)

    return stopping


def test_a_single_text_is_split_once_and_read_in_pieces(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(make_text(5000, 3))
    run_plan(plan(one_text_pieces(path, 0.05, piece_bytes=1000), tmp_path / "d"))
    [train], [val] = (documents_in(tmp_path / "d", split) for split in ("train", "val"))
    assert train + val == path.read_text()
    assert len(val) == pytest.approx(0.05 * len(train), rel=0.1)


def test_empty_invalid_and_separator_documents_are_counted(tmp_path, monkeypatch):
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
    (folder / "b.txt").write_bytes("ü Z".encode() + b"\xfcrich")
    monkeypatch.setattr(documents, "held_out", lambda name: name == "b.txt")
    monkeypatch.setattr(sources, "FEWEST", 0)
    pieces = file_pieces(names_of(folder))
    manifest = run_plan(plan(pieces, tmp_path / "d"))
    assert manifest["counts"] == {
        "empty": 2,
        "not_utf8": 3,
        "literal_separator": 1,
        "longest": 5000,
    }
    assert manifest["first_not_utf8"] == f"{folder / 'a.jsonl'}, line 3"
    assert documents_in(tmp_path / "d", "train") == [
        "é caf\ufffd",
        "\ufffd!",
        "a <|endoftext|> b",
        "long " * 1000,
    ]
    assert documents_in(tmp_path / "d", "val") == ["ü Z\ufffdrich"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', "no column 'text'.*body"),
        ("{", "not valid JSON"),
        ('["x"]', "a value of type list, not an object"),
        ('{"text": 5}', "a value of type int in 'text', not a text"),
        # Inductor raises Python's limit to 2,000 in a process in which it compiles.
        ("[" * 10**5, "nested too deeply"),
        ('{"text": "' + "x" * 500 + '"}', "a line of more than 400 bytes"),
    ],
)
def test_a_wrong_json_line_is_named_with_its_number(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(sources, "LONGEST_LINE", 400 if "400" in message else 10**6)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=f"a.jsonl, line 2, .*{message}"):
        run_plan(plan(file_pieces(names_of(tmp_path)), tmp_path / "d"))


def test_a_worker_process_raises_the_same_error_for_a_wrong_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALL", 0)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\n')
    pieces = file_pieces(names_of(tmp_path), piece_bytes=10)
    with pytest.raises(ValueError, match="a.jsonl, line 2, has no column") as caught:
        run_plan(plan(pieces, tmp_path / "d"), workers=2)
    assert "gpt2_accel" in str(caught.traceback[-1].path)  # so `cli.run` prints one sentence


WRONG = {
    "gzip.jsonl.gz": (b'{"text": "fine"}\n', "cannot be read .*incorrect header"),
    "cut.jsonl.gz": (gzip.compress(random.Random(0).randbytes(9**5))[:9999], "cannot be read"),
    "zstd.jsonl.zst": (b'{"text": "fine"}\n', "cannot be read .*ZSTD"),
    "flipped.parquet": (b"PAR1" + bytes(99) + b"PAR1", "cannot be read"),
    "latin1.txt": ("Äpfel und Öl".encode("latin1"), r"not UTF-8 \(its byte 0 is 0xc4\)"),
    "latin1.jsonl": ('{"text": "Äpfel"}'.encode("latin1"), r"not UTF-8 \(its byte 10 is 0xc4\)"),
    "utf16.txt": ("text".encode("utf-16"), "binary or UTF-16"),
    "utf16.jsonl": ('{"text": "fine"}'.encode("utf-16"), "binary or UTF-16"),
    "binary.txt": (bytes(range(256)), "binary or UTF-16"),
    "paper.pdf": (b"%PDF-1.4\n1 0 obj", "a PDF file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_of_another_format_is_refused_before_any_work(tmp_path, name):
    content, message = WRONG[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} .*{message}") as caught:
        file_pieces({tmp_path / name: name})
    assert "\n" not in str(caught.value)


def test_a_column_that_is_not_text_is_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet, row 0, has a value of type int in 'text'"):
        file_pieces(names_of(tmp_path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_byte_order_mark_is_skipped(tmp_path, name):
    text = "text of it" if name == "a.txt" else '{"text": "text of it"}\n'
    write = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(write(text.encode("utf-8-sig")))
    [piece, *_] = file_pieces({tmp_path / name: name})
    document = next(piece.documents())
    assert "text of it".startswith("".join(document.chunks))
    (tmp_path / "b.txt").write_bytes("text".encode("utf-8-sig"))
    assert sources.read_text(tmp_path / "b.txt") == "text"


class Resets(BaseHTTPRequestHandler):
    """Closes the connection early in the first two responses."""

    asked = 0

    def do_GET(self):
        type(self).asked += 1
        self.send_response(200)
        self.send_header("Content-Length", "12")
        self.end_headers()
        self.wfile.write(b"all of it :)" if self.asked > 2 else b"all")

    def log_message(self, *args):
        pass


def test_an_interrupted_download_is_retried(monkeypatch):
    monkeypatch.setattr(sources, "PAUSES", (0, 0))
    with HTTPServer(("127.0.0.1", 0), Resets) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/text"
        monkeypatch.setattr(sources, "TINY_SHAKESPEARE", url)
        assert sources.tiny_shakespeare() == "all of it :)"
        Resets.asked = -9
        with pytest.raises(ConnectionError, match=r"IncompleteRead.*: give the text by --input"):
            sources.tiny_shakespeare()
        server.shutdown()


def test_a_piece_is_retried_when_the_network_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PAUSES", (0, 0))
    tried = []

    def fails(number):
        tried.append(number)
        yield "half a document"
        with sources.reading("https://example.org/file"):
            if len(tried) < 3:
                raise RuntimeError("reset by peer")

    pieces = [Texts("train", Again(lambda: fails(0))), Texts("val", ["text"])]
    run_plan(plan(pieces, tmp_path / "d"))
    assert documents_in(tmp_path / "d", "train") == ["half a document"] and tried == [0, 0, 0]
    tried[:] = [-9]
    pieces[0] = Texts("train", Again(lambda: fails(0) if tried.clear() is None else ()))
    with pytest.raises(ConnectionError, match="https://example.org/file cannot be read .reset by"):
        run_plan(plan(pieces, tmp_path / "e"))


class Again:
    """An iterable that calls `begin` for each iterator."""

    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        return self.begin()


HELD_OUT = next(i for i in range(100) if held_out(f"{i}.txt"))


@pytest.mark.parametrize("words", [[400], [300] * 3, [20] * HELD_OUT + [3000]])
def test_few_texts_hold_out_their_last_parts(tmp_path, words):
    for i, count in enumerate(words):
        (tmp_path / f"{i}.txt").write_text(make_text(count, i))
    pieces = file_pieces(names_of(tmp_path))
    manifest = run_plan(plan(pieces, tmp_path / "d"))
    train, val = (manifest["splits"][split] for split in ("train", "val"))
    assert train["documents"] == len(words)
    assert 0.02 < val["tokens"] / (train["tokens"] + val["tokens"]) < 0.08
    for document in documents_in(tmp_path / "d", "val"):
        assert any(path.read_text().endswith(document) for path in tmp_path.glob("*.txt"))


def test_unique_leaves_out_copies_and_says_so(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name, seed in (("a.txt", 1), ("b.txt", 2), ("c.txt", 1)):
        (folder / name).write_text(make_text(300, seed))
    command = (ROOT / "recipes/prepare_data.py", "text", folder, "--tokenizer", "bytes")
    counts = {}
    for flags in ([], ["--unique"]):
        data_dir = tmp_path / f"data{len(flags)}"
        done = python(*command, *flags, "--workers", 1, "--data_dir", data_dir)
        assert done.returncode == 0, done.stderr
        manifest = read_manifest(data_dir)
        counts[len(flags)] = manifest["splits"]["train"]["documents"]
        assert ("1 of 3 files are copies" in manifest["source"]) == bool(flags)
    assert counts == {0: 3, 1: 2}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_few_rows_hold_out_their_last_parts(tmp_path, name):
    texts = [make_text(100, seed) for seed in range(3)]
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name)
    else:
        (tmp_path / name).write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run_plan(plan(file_pieces(names_of(tmp_path)), tmp_path / "d"))
    train, val = (documents_in(tmp_path / "d", split) for split in ("train", "val"))
    assert [first + last for first, last in zip(train, val, strict=True)] == texts
    assert 0.02 < len("".join(val)) / len("".join(texts)) < 0.08


def test_a_data_set_is_read_by_row_groups_or_streamed(corpus, tmp_path):
    folder, texts = corpus
    for kind, pattern in (("parquet", "d.parquet"), ("json", "a.jsonl")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / pattern).write_bytes((folder / pattern).read_bytes())
        pieces, revision = hub_pieces(str(tmp_path / kind), piece_bytes=1000)
        assert revision is None and (len(pieces) > 3) == (kind == "parquet")
        run_plan(plan(pieces, tmp_path / f"{kind}-made"))
        made = [documents_in(tmp_path / f"{kind}-made", split) for split in ("train", "val")]
        assert sorted(made[0] + made[1]) == sorted(texts)
    with pytest.raises(ValueError, match="no column 'body'.*text"):
        hub_pieces(str(tmp_path / "parquet"), column="body")
    with pytest.raises(ValueError, match="no split 'test'.*train"):
        hub_pieces(str(tmp_path / "parquet"), split="test")
    with pytest.raises(ValueError, match="not stored as Parquet"):
        hub_pieces(str(tmp_path / "json"), hold_out=lambda count: Drawn(count, 0.1, 0))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "csv"])
def test_changed_files_of_a_local_data_set_are_noticed(tmp_path, monkeypatch, suffix):
    folder, target = tmp_path / "set", tmp_path / "d"
    folder.mkdir()

    def write(number, seed):
        texts = [make_text(5, seed + i) for i in range(40)]
        if suffix == "csv":
            content = "text\n" + "".join(json.dumps(text) + "\n" for text in texts)
        else:
            content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        data = content.encode()
        data = gzip.compress(data) if suffix.endswith("gz") else data
        (folder / f"{number}.{suffix}").write_bytes(data)

    def made(data_dir):
        return plan(hub_pieces(str(folder))[0], data_dir)

    for number in range(3):
        write(number, 100 * number)
    size = sum(piece.size for piece in made(target).pieces)
    assert size == sum(f.stat().st_size for f in folder.iterdir()) * (3 if ".gz" in suffix else 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenizing.PieceWriter, "write", stops_at(2, tokenizing.PieceWriter))
        run_plan(made(target))
    write(0, 5000)
    tried = []

    def counted(self, number, *rest, write=tokenizing.PieceWriter.write):
        tried.append(number)
        write(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizing.PieceWriter, "write", counted)
        run_plan(made(target))
        run_plan(made(target))  # complete already
    assert tried == [0, 2]
    run_plan(made(tmp_path / "e"))
    assert same(target, tmp_path / "e")
    write(1, 7000)
    with pytest.raises(FileExistsError, match="exists already"):
        run_plan(made(target))


def test_pieces_of_the_hub_are_those_of_release_0_3():
    """Their hash decides whether work and data of 0.3 are recognized; the revision stands for the content."""
    piece = StreamPiece("u/n", (("revision", "abc"), ("split", "train")), 0, 3, "text", ByHash())
    assert repr(piece) == (
        "StreamPiece(name='u/n', options=(('revision', 'abc'), ('split', 'train')), number=0, count=3, column='text', "
        "is_held_out=ByHash(), size=0)"
    )


def test_held_out_rows_equal_those_of_train_test_split(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"row": range(20_001)})
    drawn = rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True)["test"]["row"]
    is_held_out = Drawn(20_001, 0.0005, 2357)
    assert sorted(drawn) == [row for row in range(20_001) if is_held_out(str(row))]


def test_splits_of_openwebtext_and_fineweb_edu(corpus, tmp_path):
    texts = corpus[1]
    source = tmp_path / "set"
    source.mkdir()
    for i in range(2):
        part = pyarrow.table({"text": [f"{i} {text}" for text in texts * 10]})
        pyarrow.parquet.write_table(part, source / f"train-{i}.parquet", row_group_size=100)
    common = ("--tokenizer", "bytes", "--workers", 1)
    owt = recipe(
        "openwebtext", source, "--data_files", "*.parquet", *common, "--data_dir", tmp_path / "o"
    )
    assert "val: 2 documents" in owt.stdout, owt.stderr
    rows = np.random.default_rng(2357).permutation(4000)[:2]
    everything = [f"{i} {text}" for i in range(2) for text in texts * 10]
    assert documents_in(tmp_path / "o", "val") == [everything[row] for row in sorted(rows)]

    edu = recipe(
        "fineweb-edu",
        *(source, "--config", "default", *common, "--data_dir", tmp_path / "e"),
        *("--shard_tokens", 5000),
    )
    assert edu.returncode == 0, edu.stderr
    splits = read_manifest(tmp_path / "e")["splits"]
    assert splits["val"]["tokens"] == 5000 and len(splits["val"]["shards"]) == 1
    val, train = (TokenStream(tmp_path / "e", split) for split in ("val", "train"))
    expected = [token for text in everything for token in (256, *text.encode())]
    assert [*val.read(0, 5000), *train.read(0, train.tokens)] == expected
    assert splits["val"]["bytes"] == 5000 - expected[:5000].count(256)
    assert splits["val"]["bytes"] + splits["train"]["bytes"] == len("".join(everything).encode())


def test_a_missing_network_is_reported_within_seconds(tmp_path):
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, RECIPE, "hf", "nobody/nothing", "--data_dir", tmp_path / "d"]
    begun = time.monotonic()
    env = {**os.environ, **away}  # read at import
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - begun < 22  # the libraries' own retries take 24
    [line] = [text for text in done.stderr.splitlines() if text.strip()]
    assert done.returncode == 1 and "Hub cannot be reached" in line


# Workers, kills, disks


def test_the_shards_do_not_depend_on_the_number_of_workers(corpus, tmp_path):
    pieces = file_pieces(names_of(corpus[0]), piece_bytes=5000)
    settings = {"shard_tokens": 7000}
    run_plan(plan(pieces, tmp_path / "one", **settings), workers=1)
    run_plan(plan(pieces, tmp_path / "two", **settings), workers=2)
    assert same(tmp_path / "one", tmp_path / "two")


def test_datatrove_writes_the_same_shards(corpus, tmp_path, times):
    """Also after SIGKILL, which leaves its tasks running, and after its result was removed."""
    pytest.importorskip("datatrove", reason="needs the extra [scale]")
    args = ("text", corpus[0], "--tokenizer", "bytes", "--shard_tokens", 7000)
    done = recipe(*args, "--workers", 1, "--data_dir", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    one, rng = read_manifest(tmp_path / "one"), random.Random(0)
    for i in range(times(1, 20)):
        target = tmp_path / f"try{i}" / "d"
        command = (*args, "--executor", "datatrove", "--data_dir", target)
        process = Started(RECIPE, *command, "--workers", 2, log=tmp_path / "log")
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.5, 2.5))
        for workers in (2, 1):
            done = recipe(*command, "--workers", workers)
            assert done.returncode == 0 and "train: " in done.stdout, done.stderr
            two = read_manifest(target)
            assert {**two, "command": one["command"]} == one
            assert verify_data(target) == len(list(target.glob("*.bin")))
            assert not (target.parent / ".d.partial").exists()
            shutil.rmtree(target)
        with suppress(ProcessLookupError):  # datatrove's manager stays after a SIGKILL
            os.killpg(process.pids[0], signal.SIGKILL)
    with lock_folder(target.parent / ".d.partial"):
        done = recipe(*command)
    assert done.returncode == 1 and f"in use by process {os.getpid()} on" in done.stderr


def test_a_task_of_replaced_work_writes_nothing(tmp_path):
    """As a Slurm job that was submitted before another command took its folder."""
    pytest.importorskip("datatrove", reason="needs the extra [scale]")
    from gpt2_accel.data.cluster import FinishShards, ReadPiece, WritePiece

    older, newer = (
        plan([Texts("train", [text]), Texts("val", [text])], tmp_path / "d") for text in "ab"
    )
    prepare_module.begin(older)
    write, finish = WritePiece(older), FinishShards(older)
    data = list(ReadPiece(older).run(None, 0))

    def replaced():
        yield from data
        prepare_module.begin(newer)

    for stream in (replaced(), data):
        with pytest.raises(ValueError, match=".d.partial .* by another command"):
            list(write.run(stream, 0))
    with pytest.raises(ValueError, match="another command"):
        list(finish.run(None))
    assert [*(tmp_path / ".d.partial/pieces").iterdir()] == []
    run_plan(newer)
    assert documents_in(tmp_path / "d", "train") == ["b"]
    with pytest.raises(FileExistsError):
        list(finish.run(None))
    list(FinishShards(newer).run(None))  # a job that Slurm starts a second time


def started_by(process: psutil.Process) -> str | None:
    """The `STARTED_BY` of a process's environment, None if it cannot be read."""
    with suppress(psutil.Error):
        return process.environ().get("STARTED_BY")


def test_a_killed_preparation_resumes_to_the_same_shards(tmp_path, times, report):
    folder = tmp_path / "c"
    folder.mkdir()
    for i in range(4):
        lines = (json.dumps({"text": make_text(40, 1000 * i + j)}) for j in range(1500))
        (folder / f"{i}.jsonl").write_text("\n".join(lines))
    args = ("text", folder, "--tokenizer", "bytes", "--shard_tokens", 100_000, "--workers", 2)
    ask({"poll": []})  # starts the fork server, so that `duration` is that of the recipe
    begun = time.monotonic()
    whole = recipe(*args, "--data_dir", tmp_path / "whole" / "d")
    assert whole.returncode == 0, whole.stderr
    duration = time.monotonic() - begun
    rng, tries, killed = random.Random(0), times(1, 32), 0
    for i in range(tries):
        target = tmp_path / f"try{i}" / "d"
        while True:
            process = Started(
                *(RECIPE, *args, "--data_dir", target),
                log=tmp_path / "log",
                STARTED_BY=str(tmp_path),
            )
            try:
                once = killed and not LONG
                assert process.wait(*() if once else (rng.uniform(0.3, 1.1) * duration,)) == 0
                break
            except subprocess.TimeoutExpired:  # `wait` has killed it
                process.wait()
                killed += 1
                if killed % 3 == 0:
                    continue
        made, expected = (read_manifest(path) for path in (target, tmp_path / "whole/d"))
        made["command"] = expected["command"]
        assert made == expected
        for shard in expected["splits"]["train"]["shards"] + expected["splits"]["val"]["shards"]:
            assert filecmp.cmp(
                target / shard["file"], tmp_path / "whole/d" / shard["file"], shallow=False
            )
        assert [path.name for path in target.parent.iterdir()] == ["d"]
    assert killed >= 1 or not LONG
    deadline = time.monotonic() + 20
    while left := [p for p in psutil.process_iter() if started_by(p) == str(tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    report("SIGKILL at a random time while data is prepared", killed, killed, "the pieces at hand")


def test_finished_pieces_are_not_tokenized_again(corpus, tmp_path, monkeypatch):
    pieces = file_pieces(names_of(corpus[0]), piece_bytes=5000)
    tried = []

    def failing(self, number, documents, progress, write=tokenizing.PieceWriter.write):
        tried.append(number)
        if len(tried) == 6:
            raise OSError("No space left on device")
        write(self, number, documents, progress)

    monkeypatch.setattr(tokenizing.PieceWriter, "write", failing)
    with pytest.raises(OSError, match="No space"):
        run_plan(plan(pieces, tmp_path / "d"))
    run_plan(plan(pieces, tmp_path / "d"))
    assert tried == [*range(6), *range(5, len(pieces))]
    run_plan(plan(pieces, tmp_path / "d"))  # complete already
    assert len(tried) == len(pieces) + 1
    monkeypatch.undo()
    run_plan(plan(pieces, tmp_path / "e"))
    assert same(tmp_path / "d", tmp_path / "e")


def test_a_full_disk_leaves_no_partial_shards(corpus, tmp_path, small_disk):
    disk = small_disk(1)
    pieces = file_pieces(names_of(corpus[0]), piece_bytes=5000)
    for piece in pieces:
        object.__setattr__(piece, "size", 0)  # skips the check of the free space
    (disk / "filler").write_bytes(bytes(2**20 - 60 * 4096))
    with pytest.raises(OSError, match="No space left"):
        run_plan(plan(pieces, disk / "d", shard_tokens=20_000))
    assert not (disk / "d").exists()
    (disk / "filler").unlink()
    run_plan(plan(pieces, disk / "d", shard_tokens=20_000))
    run_plan(plan(pieces, tmp_path / "d", shard_tokens=20_000))
    assert same(disk / "d", tmp_path / "d")


def test_a_disk_that_is_too_small_is_reported_first(corpus, tmp_path, monkeypatch):
    pieces = file_pieces(names_of(corpus[0]))
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(tokenizing.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="1.0 kB free.*make room"):
        run_plan(plan(pieces, tmp_path / "d"))


def stop(*args):
    raise KeyboardInterrupt


def test_another_preparation_in_the_same_folder_is_refused(corpus, tmp_path, monkeypatch):
    pieces = file_pieces(names_of(corpus[0]))
    target = tmp_path / "d"
    with (
        lock_folder(tmp_path / ".d.partial"),
        pytest.raises(OSError, match="in use by .*--data_dir"),
    ):
        run_plan(plan(pieces, target))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan(pieces, target))
    with pytest.raises(ValueError, match="unfinished work on another text"):
        run_plan(plan(pieces, target, train_bpe(["abc"], 260)))
    run_plan(plan(pieces, target))
    with pytest.raises(FileExistsError, match="exists already"):
        run_plan(plan(pieces, target, shard_tokens=5))


def test_a_link_to_nothing_is_refused_before_the_work(tmp_path):
    (tmp_path / "data").symlink_to("nothing")
    with pytest.raises(FileExistsError, match="exists already"):
        prepare(
            {"train": ["a"], "val": ["b"]}, train_bpe(["abc"], 260), tmp_path / "data", source="x"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_corrected_command_works_after_a_mistake(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"body": "text {i}"}}\n' for i in range(100)))
    args = ("text", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--data_dir", tmp_path / "d")
    done = recipe(*args)
    assert "has no column 'text': give --column body" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    # Work that was killed before its first finished piece is replaced.
    (tmp_path / ".d.partial/pieces").mkdir(parents=True)
    (tmp_path / ".d.partial/plan.json").write_text('{"plan": "of something else"}')
    (tmp_path / ".d.partial/pieces/000000.train").write_bytes(b"half")
    done = recipe(*args, "--column", "body")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / ".d.partial").exists() and (tmp_path / "d/manifest.json").exists()


def test_only_corrected_pieces_are_tokenized_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALL", 0)
    for i in range(6):
        lines = [json.dumps({"text": make_text(30, 10 * i + j)}) for j in range(8)]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines))
    whole = (tmp_path / "4.jsonl").read_text()
    (tmp_path / "4.jsonl").write_text(f"{whole}\n{{")
    tried = []

    def counted(self, number, documents, progress, write=tokenizing.PieceWriter.write):
        tried.append(number)
        write(self, number, documents, progress)

    monkeypatch.setattr(tokenizing.PieceWriter, "write", counted)
    with pytest.raises(ValueError, match="4.jsonl, line .* not valid JSON"):
        run_plan(plan(file_pieces(names_of(tmp_path)), tmp_path / "d"))
    (tmp_path / "4.jsonl").write_text(whole)
    pieces = file_pieces(names_of(tmp_path))
    # A kill while the work folder changes plans leaves work that either plan can resume.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "write_json", stop)
        run_plan(plan(pieces, tmp_path / "d"))
    run_plan(plan(pieces, tmp_path / "d"))
    assert tried == [0, 1, 2, 3, 4, 4, 5]
    run_plan(plan(pieces, tmp_path / "e"))
    assert same(tmp_path / "d", tmp_path / "e")


def test_verify_and_stats(tmp_path):
    prepare(
        {"train": ["one two", "three " * 100], "val": ["four"]},
        byte_tokenizer(),
        tmp_path / "d",
        source="made up",
    )
    done = recipe("--verify", "--stats", "--data_dir", tmp_path / "d")
    assert "all 2 shards are intact" in done.stdout
    assert "609 tokens, 1.00 bytes per token, 2 documents of 304 tokens" in done.stdout
    assert "4 to          7 tokens            1 █" in done.stdout
    assert "'one two'" in done.stdout
    path = tmp_path / "d/train_000000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    done = recipe("--verify", "--data_dir", tmp_path / "d")
    assert "train_000000.bin does not match its checksum" in done.stderr and done.returncode == 1
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="train_000000.bin has .* bytes, the manifest says"):
        TokenStream(tmp_path / "d", "train")
    assert Path(tmp_path / "d/tokenizer").is_dir()
