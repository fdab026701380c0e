"""Prepared data on the Hub: push, pull and training from it, with the real client and a local server."""

import gzip
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from conftest import (
    as_flags,
    contents,
    losses,
    make_text,
    metrics,
    refused,
    run,
    status,
    tiny_config,
)
from hub_server import TOKEN, Handler, Hub
from launching import ROOT, launch, wait_for

from gpt2_accel.checkpoint import find
from gpt2_accel.data import loader, remote
from gpt2_accel.data.loader import Batch, EvalLoader, TrainLoader
from gpt2_accel.data.prepare import prepare_sources
from gpt2_accel.data.remote import RemoteShards
from gpt2_accel.data.shards import (
    TokenStream,
    UnreadableData,
    data_fingerprint,
    read_manifest,
)
from gpt2_accel.data.sources import texts
from gpt2_accel.hf import hub_data
from gpt2_accel.hf.hub_data import open_hub, pull_data, push_data
from gpt2_accel.tokenizer import byte_tokenizer, save_tokenizer

SCRIPT = "tests/train_script.py"
REPO = "user/words"


class User:
    """A user of a server, who is logged in, with an empty cache."""

    def __init__(self, server: Hub, home: Path):
        self.server = server
        self.env = os.environ | {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
        }
        self.env |= {"HF_HOME": str(home / "hf"), "GPT2_ACCEL_CACHE": str(home / "cache")}
        self.env |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_DISABLE_XET": "1"}

    def start(self, *command, log: Path) -> subprocess.Popen:
        with open(log, "ab") as output:
            command = [sys.executable, *map(str, command)]
            return subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=output, stderr=output)

    def succeed(self, *command, log: Path) -> str:
        assert self.start(*command, log=log).wait(200) == 0, log.read_text()
        return log.read_text()


@pytest.fixture
def user(tmp_path):
    with Hub() as server:
        yield User(server, tmp_path)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Byte-level data in several shards of each split."""
    folder = tmp_path_factory.mktemp("shards") / "words"
    train = [make_text(300, seed) for seed in range(30)]
    val = [make_text(100, seed) for seed in range(30, 36)]
    source = texts("made up", {"train": train, "val": val})
    prepare_sources([source], byte_tokenizer(), folder, source="made up", shard_tokens=9000)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): content for path, content in contents(folder).items()}


def same_run(one: Path, other: Path) -> bool:
    """Whether two runs have the same losses and weights, to the last bit."""
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, other)]
    figures = [
        [(line["step"], line.get("train/loss"), line.get("val/loss")) for line in metrics(folder)]
        for folder in (one, other)
    ]
    return weights[0] == weights[1] and figures[0] == figures[1]


def sums_of(data: bytes, piece: int) -> str:
    """Returns the digests in the manifest."""
    parts = [data[start : start + piece] for start in range(0, len(data), piece)]
    return "".join(hashlib.sha256(part).hexdigest()[:32] for part in parts)


def test_data_is_pushed_pulled_and_trained_on(user, shards, tmp_path, times):
    server, log = user.server, tmp_path / "log"
    pushed = shutil.copytree(shards, tmp_path / "pushed")
    commands = [
        ["push", REPO, "--data_dir", str(pushed)],
        ["pull", REPO, "--data_dir", str(tmp_path / "all")],
    ]
    script = tmp_path / "commands.py"
    script.write_text(
        "import runpy, sys\n"
        f"for words in {commands}:\n"
        "    sys.argv[1:] = words\n"
        "    runpy.run_path('recipes/prepare_data.py', run_name='__main__')\n"
    )
    said = user.succeed(script, log=log)
    assert f"The data is at {server.url}" in said
    assert re.search(r"user/words: \d+ files, [\d.]+kB", said)
    card = server.files(REPO)["README.md"].decode()
    assert "license: other" in card and "Source: made up" in card and "hub:user/words" in card
    assert server.repos[REPO]["private"]
    assert files_of(tmp_path / "all") == files_of(pushed)
    assert data_fingerprint(pushed) == data_fingerprint(shards)
    manifest = read_manifest(tmp_path / "all")
    for shard in shards.glob("*.bin"):
        assert manifest["sums"][shard.name] == sums_of(shard.read_bytes(), 2**18)

    # A run that reads from a Hub with faults, and is killed, equals one that reads from the disk.
    settings = {"max_steps": times(20, 200), "save_every": 4, "eval_every": 10}
    config = tiny_config(shards, tmp_path / "local", resume_from="latest", **settings)
    expected = losses(run(config))
    config = replace(config, data_dir=f"hub:{REPO}", output_dir=str(tmp_path / "remote"))
    server.faults += [("GET", ".bin", fault) for fault in (503, 429, 500)]
    for _ in range(times(1, 20)):
        before = len(metrics(tmp_path / "remote"))
        process = user.start(SCRIPT, *as_flags(config), log=log)
        wait_for(lambda: len(metrics(tmp_path / "remote")) > before, 200)  # noqa: B023
        time.sleep(random.random() / 20)
        assert process.poll() is None
        process.kill()
        process.wait()
    assert "Exception ignored" not in user.succeed(SCRIPT, *as_flags(config), log=log)
    assert same_run(tmp_path / "remote", tmp_path / "local")

    # Two processes share the cache. All pieces are in it, so that no Hub is needed.
    config = replace(config, output_dir=str(tmp_path / "both"))
    cache = {"GPT2_ACCEL_CACHE": user.env["GPT2_ACCEL_CACHE"]}
    launch(SCRIPT, *as_flags(config), processes=2, **cache)
    assert losses(metrics(tmp_path / "both"))[:20] == pytest.approx(expected[:20], abs=1e-6)


class Files:
    """A `Fetch` of the files of a folder, which counts its calls and fails while it is `away`."""

    def __init__(self, folder: Path):
        self.folder, self.calls, self.away, self.back = folder, 0, False, False

    def __call__(self, file: str, start: int, end: int, size: int) -> bytes:
        self.calls += 1
        if self.away:
            raise UnreadableData("the Hub is away")
        return (self.folder / file).read_bytes()[start:end]


def test_a_run_without_the_hub_ends_with_a_checkpoint_and_continues_later(
    shards, tmp_path, monkeypatch, before_update
):
    files, cache = Files(shards), tmp_path / "user--words"
    monkeypatch.setenv("GPT2_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(remote, "PIECE", 2048)
    monkeypatch.setattr(loader, "AHEAD", 4)
    monkeypatch.setattr(hub_data, "fetch_bytes", lambda repo_id, commit, *place: files(*place))
    for name in ("manifest.json", "tokenizer"):
        copy = shutil.copytree if name == "tokenizer" else shutil.copy
        cache.mkdir(exist_ok=True)
        copy(shards / name, cache / name)
    (cache / "commit.txt").write_text("0" * 40)
    settings = {"max_steps": 20, "save_every": 8, "resume_from": "latest"}
    run(tiny_config(shards, tmp_path / "local", **settings))

    def fail(step: int) -> None:
        files.away = step >= 12 and not files.back

    before_update(fail)
    config = tiny_config(f"hub:{REPO}", tmp_path / "remote", **settings)
    with pytest.raises(UnreadableData, match="^the Hub is away$"):
        run(config)
    assert status(config.output_dir)["state"] == "failed"
    assert find.list_checkpoints(config.output_dir)[-1].name > "checkpoint-11"
    files.away, files.back = False, True
    run(config)
    assert same_run(tmp_path / "remote", tmp_path / "local")


def test_remote_shards_give_the_same_batches(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PIECE", 512)
    monkeypatch.setattr(loader, "AHEAD", 32)
    reader = RemoteShards(tmp_path, Files(shards), {})
    train, val = (
        [(TokenStream(shards, split, reading), 1.0) for reading in (None, reader)]
        for split in ("train", "val")
    )
    options = {"sequence_length": 32, "micro_batch_size": 4, "seed": 1}
    loaders = [TrainLoader([part], **options) for part in train]
    for first in range(0, 8 * 60, 8):
        assert same_batches(*(loader.update(first, 8) for loader in loaders))
    options = {"sequence_length": 32, "batch_size": 4, "max_tokens": 9000}
    assert same_batches(*(EvalLoader([part], **options) for part in val))


def same_batches(*batches: Iterable[Batch]) -> bool:
    return all(
        torch.equal(one.input_ids, other.input_ids) and torch.equal(one.targets, other.targets)
        for one, other in zip(*batches, strict=True)
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server that this process is logged in to, and an empty cache."""
    monkeypatch.setenv("GPT2_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield server


def part_of_compressed(hub, data, start, end):
    """Answers as a CDN that stores a compressed file."""
    stored = gzip.compress(data)
    place = f"bytes {start}-{end - 1}/{len(stored)}"
    encoding = [("Content-Range", place), ("Content-Encoding", "gzip")]
    hub.answer(206, stored[start:end], encoding)


def compressed_if_accepted(hub, data, start, end):
    accepted = "gzip" in hub.headers.get("Accept-Encoding", "")
    (part_of_compressed if accepted else Handler.send_part)(hub, data, start, end)


def other(**changes):
    """Returns an answer that differs by the results of functions of (data, start, end)."""

    def answer(hub, *part):
        hub.send_part(*part, **{name: change(*part) for name, change in changes.items()})

    return answer


WRONG = {
    "page": other(status=lambda *_: 200, body=lambda data, start, end: b"<p>".ljust(end - start)),
    "range": other(place=lambda data, start, end: f"bytes 0-{end - start - 1}/{len(data)}"),
    "size": other(place=lambda data, start, end: f"bytes {start}-{end - 1}/{len(data) + 1}"),
    "none": other(place=lambda *_: "bytes"),
    "short": other(body=lambda data, start, end: data[start : end - 1]),
    "gzip": part_of_compressed,
    "zeros": other(body=lambda data, start, end: bytes(end - start)),
}


@pytest.mark.parametrize("listed", [True, False])  # False: as releases before 0.5 pushed data
def test_each_answer_is_checked(hub, shards, monkeypatch, listed):
    monkeypatch.setattr(remote, "PIECE", 1024)
    files = files_of(shards)
    if listed:
        manifest = json.loads(files["manifest.json"])
        bins = [name for name in files if name.endswith(".bin")]
        manifest["sums"] = {name: sums_of(files[name], 1024) for name in bins}
        files["manifest.json"] = json.dumps(manifest).encode()
    hub.repos[REPO] = {"commits": [("1" * 40, files)]}
    [(stream, _)] = loader.open_split(f"hub:{REPO}", "train", open_hub(f"hub:{REPO}"))
    tokens = np.frombuffer(files["train_000000.bin"], "<u2", offset=64).tolist()

    def read(piece: int) -> None:
        assert stream.read(512 * piece, 400).tolist() == tokens[512 * piece :][:400]

    numbers = itertools.count()
    with Hub() as cdn:
        cdn.blobs["train"] = files["train_000000.bin"]
        moved = [("Location", f"{cdn.url}/lfs/train")]
        for answer in (
            lambda handler, *_: handler.answer(302, b"", moved),
            lambda handler, data, *_: handler.answer(200, data),
            compressed_if_accepted,
        ):
            hub.faults.append(("GET", "train_000000.bin", answer))
            read(next(numbers))
        assert "Authorization" in hub.headers and "Authorization" not in cdn.headers
    for answer in WRONG:
        number = next(numbers)
        hub.faults.append(("GET", "train_000000.bin", WRONG[answer]))
        if listed or answer != "zeros":
            with pytest.raises(UnreadableData, match=r"train_000000.bin (cannot be|does not)"):
                read(number)
            read(number)


def test_damaged_pieces_in_the_cache_are_fetched_anew(shards, tmp_path):
    files = Files(shards)
    stream = TokenStream(shards, "train", RemoteShards(tmp_path, files, {}))
    expected = TokenStream(shards, "train").read(0, 1000).tolist()
    assert stream.read(0, 1000).tolist() == expected
    [piece] = tmp_path.glob("*.pieces/*")
    content = piece.read_bytes()
    for damaged in (b"", content[:500], content[:-1], bytes(len(content)), b"?" + content[1:]):
        piece.write_bytes(damaged)
        files.calls = 0
        for _ in range(2):
            assert stream.read(0, 1000).tolist() == expected
        assert files.calls == 1


@pytest.mark.parametrize("kind, start", [("<u2", (20240520, 1)), ("<u4", (20240801, 7))])
def test_token_files_of_llm_c_are_pulled(kind, start, hub, tmp_path):
    """Those of Llama 3 with the tokenizer beside them."""
    save_tokenizer(byte_tokenizer(), tmp_path / "t")
    files = {f"tokenizer/{path.name}": path.read_bytes() for path in (tmp_path / "t").iterdir()}
    ids = np.random.default_rng(0).integers(0, 257, 500)
    for name in ("train_000001", "train_000002", "val_000000"):
        header = np.zeros(256, "<i4")
        header[:3] = *start, len(ids)
        files[f"x_{name}.bin"] = header.tobytes() + ids.astype(kind).tobytes()
    hub.repos["u/x"] = {"private": False, "commits": [("1" * 40, files)]}
    with refused("u/x holds no prepared data, .* token files .* by prepare_data.py pull"):
        open_hub("hub:u/x")
    pull_data("u/x", tmp_path / "all")
    [(stream, _)] = loader.open_split(tmp_path / "all", "train")
    assert stream.read(0, 1000).tolist() == [*ids, *ids]


def test_what_is_no_prepared_data_is_refused(hub, shards, tmp_path):
    with refused("user/nothing cannot be found on the Hub"):
        open_hub("hub:user/nothing")
    hub.repos["user/text"] = {"commits": [("1" * 40, {"a.txt": b"a"})]}
    with refused("user/text holds no prepared data"):
        open_hub("hub:user/text")
    assert not list((tmp_path / "cache").glob("[!.]*/*"))
    damaged = shutil.copytree(shards, tmp_path / "damaged")
    with open(damaged / "val_000000.bin", "r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    with refused("val_000000.bin does not match its checksum"):
        push_data(damaged, REPO)
