"""Prepared data on the Hub, with the real client and a local server."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest
from conftest import (
    contents,
    losses,
    make_text,
    refused,
    run,
    run_recipe,
    tiny_config,
)
from hub_server import TOKEN, Hub

from gpt2_accel.data.prepare import prepare_sources
from gpt2_accel.data.source import open_data
from gpt2_accel.data.sources import texts
from gpt2_accel.hf.hub_data import open_hub, push_data
from gpt2_accel.tokenizer import byte_tokenizer

REPO = "user/words"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Byte-level data in several shards of each split."""
    folder = tmp_path_factory.mktemp("shards") / "words"
    train = [make_text(300, seed) for seed in range(30)]
    val = [make_text(100, seed) for seed in range(30, 36)]
    source = texts("made up", {"train": train, "val": val})
    prepare_sources([source], byte_tokenizer(), folder, source="made up", shard_tokens=9000)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server to which this process is logged in, and an empty cache."""
    monkeypatch.setenv("GPT2_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield server


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): content for path, content in contents(folder).items()}


def test_data_is_pushed_pulled_and_trained_on(hub, shards, tmp_path):
    pushed = shutil.copytree(shards, tmp_path / "pushed")
    pulled = tmp_path / "pulled"
    run_recipe("prepare_data", "push", REPO, "--data_dir", pushed)
    run_recipe("prepare_data", "pull", REPO, "--data_dir", pulled)
    assert hub.repos[REPO]["private"]
    assert "Source: made up" in (pulled / "README.md").read_text()
    assert files_of(pulled) == files_of(pushed)
    assert open_data(pulled).fingerprint == open_data(shards).fingerprint

    settings = {"max_steps": 20, "eval_every": 10}
    expected = losses(run(tiny_config(shards, tmp_path / "local", **settings)))
    actual = losses(run(tiny_config(f"hub:{REPO}", tmp_path / "remote", **settings)))
    assert actual == expected
    assert files_of(tmp_path / "cache" / "user--words") == files_of(pulled)


def test_a_download_continues_and_others_wait_for_it(hub, shards, tmp_path):
    push_data(shutil.copytree(shards, tmp_path / "pushed"), REPO, private=True)
    hub.faults += [("GET", "train_000001.bin", 404)]
    with refused("start the same command again"):
        open_hub(f"hub:{REPO}")
    first = len(hub.requests)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(open_hub, [f"hub:{REPO}"] * 2))
    shards_read = [
        [Path(r).name for r in part if r.startswith("GET") and r.endswith(".bin")]
        for part in (hub.requests[:first], hub.requests[first:])
    ]
    before, again = shards_read
    assert "train_000001.bin" in again
    assert len(again) == len(set(again))  # one of the two downloads, the other waits
    assert set(again) & set(before) == {"train_000001.bin"}
    assert open_data(f"hub:{REPO}").fingerprint == open_data(shards).fingerprint


def test_a_repository_without_prepared_data_and_damaged_data_are_refused(hub, shards, tmp_path):
    with refused("user/nothing could not be downloaded .*: check the name"):
        open_hub("hub:user/nothing")
    hub.repos["user/text"] = {"commits": [("1" * 40, {"a.txt": b"a"})]}
    with refused("user--text.partial is not prepared data, since manifest.json is missing"):
        open_hub("hub:user/text")
    assert not any(request.endswith("a.txt") for request in hub.requests)
    assert not list((tmp_path / "cache").glob("[!.]*/*"))
    damaged = shutil.copytree(shards, tmp_path / "damaged")
    with open(damaged / "val_000000.bin", "r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    with refused("val_000000.bin"):
        push_data(damaged, REPO, private=True)
