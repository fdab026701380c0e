"""Prepared tokens and the training order, recorded before release 0.4.

If they change, a resumed run reads other text.

Tokens are compared over a whole split, however it is cut into shards.
"""

import hashlib

import numpy as np
import pytest
from conftest import make_text, run_recipe
from tables import table

from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.prepare import prepare, prepare_text
from gpt2_accel.data.shards import TokenStream, read_manifest
from gpt2_accel.data.source import open_data
from gpt2_accel.tokenizer import byte_tokenizer, char_tokenizer, train_bpe

RECORDED = table("data/recorded")
HELD_OUT = [25, 28, 34, 37, 52, 56]  # of 60 files, by a hash of their names


def digest(numbers) -> str:
    """Returns the start of the SHA-256 of integers."""
    return hashlib.sha256(np.asarray(numbers, "<i8").tobytes()).hexdigest()[:16]


def tokens_of(folder, split):
    """Returns all tokens of a split."""
    stream = TokenStream(folder, split)
    return stream.read(0, stream.tokens)


def recorded(folder) -> list[tuple]:
    """Returns documents, tokens and the digest of all tokens, of both splits."""
    rows = []
    for name in ("train", "val"):
        documents = read_manifest(folder)["splits"][name]["documents"]
        tokens = tokens_of(folder, name)
        rows.append((documents, len(tokens), digest(tokens)))
    return rows


def test_a_trained_bpe_and_its_tokens_do_not_change(tmp_path):
    texts = {"train": [make_text(200 + 7 * i, i) for i in range(60)]}
    texts["val"] = [make_text(150, 1000 + i) for i in range(6)]
    tokenizer = train_bpe(texts["train"], 300)
    tokens = tokenizer.encode("the old cat sat on a red mat.")
    assert tokens == [257, 68, 271, 296, 273, 272, 263, 279, 278, 13]
    prepare(texts, tokenizer, tmp_path / "data", source="made up")
    expected = [(60, 25821, "41f7ee9197740abc"), (6, 970, "b04fbfa7354ed519")]
    assert recorded(tmp_path / "data") == expected


def test_the_tokens_of_a_text_do_not_change(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(make_text(30, seed) for seed in range(200)))
    prepare_text(path, tmp_path / "data", char_tokenizer)
    expected = [(1, 22082, "d9691e419d9d10b5"), (1, 2454, "a4f23c83306b86a1")]
    assert recorded(tmp_path / "data") == expected


def test_a_folder_of_texts_keeps_its_order_and_its_held_out_files(tmp_path):
    data = tmp_path / "data"
    expected = {"train": [], "val": []}
    for folder, first in (("a", 0), ("b", 1), ("c", 2)):
        (tmp_path / "texts" / folder).mkdir(parents=True)
        for number in range(first, 60, 3):
            text = f"Document {number}. " + make_text(40 + number, number)
            (tmp_path / "texts" / folder / f"{number:02}.txt").write_text(text)
            expected["val" if number in HELD_OUT else "train"] += [256, *text.encode()]
    flags = ("--tokenizer", "bytes", "--data_dir", data)
    run_recipe("prepare_data", "text", tmp_path / "texts", *flags)
    for split, tokens in expected.items():
        assert tokens_of(data, split).tolist() == tokens


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Data sets of 50, 1,000 and 200,003 windows of one token, and a mixture of them."""
    folder = tmp_path_factory.mktemp("sets")
    for size in (50, 1000, 200_003):
        splits = {"train": [make_text(size // 2, size)[:size]]}
        prepare(splits, byte_tokenizer(), folder / str(size), source="made up")
    weights = {"50": 5, "1000": 3, "200003": 2}
    write_mixture(folder / "mix", {str(folder / name): w for name, w in weights.items()})
    return folder


@pytest.mark.parametrize("case", RECORDED["orders"], ids=lambda case: case["digest"])
def test_the_training_order_does_not_change(sets, case):
    train = open_data(sets / str(case["set"])).train
    loader = TrainLoader(train, sequence_length=1, micro_batch_size=4, seed=3)
    samples = loader.samples(case["first"], 4096).tolist()
    if case["set"] != "mix":
        samples = [window for _, window in samples]
    assert samples[:3] == case["start"]
    assert digest(samples) == case["digest"]
