"""Shards, manifests and the training order; `test_recorded.py` holds the order itself."""

import json
import shutil

import numpy as np
import pytest
from conftest import read_json, refused
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.order import shuffled
from gpt2_accel.data.shards import (
    HEADER,
    TOKEN_DTYPES,
    ShardWriter,
    TokenStream,
    UnreadableData,
    read_manifest,
    read_shard,
)
from gpt2_accel.data.source import open_data, verify_data


def write_shard(path, tokens, dtype="uint16"):
    writer = ShardWriter(path, np.dtype(dtype))
    writer.append(np.asarray(tokens))
    return writer.close()


@pytest.fixture
def copied(data_dir, tmp_path):
    """A copy of the shared data folder, which a test may damage."""
    return shutil.copytree(data_dir, tmp_path / "data")


# The training order


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
@example(150_001, 7, 0)  # three groups of blocks, the last block short
def test_the_order_is_a_permutation(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


def loader(data_dir, **changes):
    options = {"sequence_length": 16, "micro_batch_size": 2, "seed": 1} | changes
    return TrainLoader(open_data(data_dir).split("train"), **options)


# Shards


def test_a_short_read_is_an_error(data_dir, monkeypatch):
    stream = TokenStream(data_dir, "train")
    monkeypatch.setattr("os.pread", lambda *_: bytes(200))
    assert len(stream.read(7, 100)) == 100
    with pytest.raises(UnreadableData, match="train_000000.bin gave 200 of 202 bytes"):
        stream.read(0, 101)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"X" + data[1:],
        lambda data: data[:24] + b"\x00" + data[25:],  # checksum
        lambda data: data[: HEADER.size + 3],
        lambda data: data + b"\x00",
        lambda data: bytes(HEADER.size) + data[HEADER.size :],  # never closed
    ],
)
def test_a_wrong_shard_or_one_of_another_size_is_refused(tmp_path, change):
    path = tmp_path / "a.bin"
    entry = write_shard(path, range(100))
    path.write_bytes(change(path.read_bytes()))
    with refused("a.bin is not the shard"):
        read_shard(tmp_path, TOKEN_DTYPES["uint16"], entry, 0, 1)


def test_changed_tokens_and_a_replaced_shard_are_refused(copied):
    verify_data(copied)
    path = copied / "train_000000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with refused("train_000000.bin"):
        verify_data(copied)
    write_shard(path, [7] * read_manifest(copied)["splits"]["train"]["tokens"])  # the same size
    for read in (loader, verify_data):
        with refused("train_000000.bin is not the shard"):
            read(copied)


@pytest.mark.parametrize("length", [None, 99])
def test_a_tokenizer_other_than_that_of_the_manifest_is_refused(copied, length):
    path = copied / "tokenizer/tokenizer.json"
    tokenizer = read_json(path)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer)[:length])
    for check in (open_data, verify_data):  # training does the first
        with refused("(is not the|holds no) token"):
            check(copied)


def test_a_token_id_beyond_the_vocabulary_is_refused(copied):
    manifest = read_json(copied / "manifest.json")
    entry = manifest["splits"]["train"]
    entry["shards"] = [write_shard(copied / "train_000000.bin", [300] * entry["tokens"])]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UnreadableData, match=r"train_000000.bin holds the token id 300.*257"):
        list(loader(copied).update(0, 8))


def test_a_missing_split_or_shard_is_refused(copied):
    with refused("no split 'test'"):
        TokenStream(copied, "test")
    (copied / "train_000000.bin").unlink()
    with refused("train_000000.bin"):
        TokenStream(copied, "train").read(0, 1)


def test_a_manifest_cannot_name_another_file(copied):
    manifest = read_json(copied / "manifest.json")
    manifest["splits"]["train"]["shards"][0]["file"] = "/etc/passwd"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with refused("is not the shard that the manifest lists"):
        TokenStream(copied, "train")
