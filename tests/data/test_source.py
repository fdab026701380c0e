"""Data that users give: sources in several forms, and what a run does with them."""

import re
import time

import datasets
import numpy as np
import pytest
import torch
from conftest import (
    as_flags,
    long,
    metrics,
    read_json,
    refused,
    reset_accelerate,
    tiny_config,
    weights_digest,
)
from launching import launch, sharded
from seams_script import Drawn, T, Uneven, data_of, own_data
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_accel.data.loader import EvalLoader, TrainLoader
from gpt2_accel.train import train


def loader(source, micro_batch_size=4, **ranks):
    parts = data_of(source).train
    return TrainLoader(parts, sequence_length=T, micro_batch_size=micro_batch_size, seed=3, **ranks)


ROW = np.random.default_rng(1).integers(257, size=(8, T + 1))
LABELS = np.where(np.arange(T + 1) < 5, -100, ROW)
INPUTS, TARGETS = ROW[:, :-1], ROW[:, 1:]
FORMS = [
    list(ROW),
    torch.from_numpy(ROW),
    list(zip(INPUTS, TARGETS, strict=True)),
    TensorDataset(*map(torch.tensor, (INPUTS, TARGETS))),
    datasets.Dataset.from_dict({"input_ids": ROW}),
]


@pytest.mark.parametrize("source", FORMS)
def test_a_source_may_have_several_forms(source):
    data = data_of(source)
    assert data.sequence_length == T
    windows = np.stack([data.train[0][0][i] for i in range(8)], axis=1)
    assert np.array_equal(windows[:2], [INPUTS, TARGETS])
    assert data.tokens == 8 * T


def test_rows_with_labels_have_the_loss_of_transformers():
    """`labels` are not shifted. What the mask hides does not count, so it is -100 here."""
    row = {"input_ids": ROW[0, :T], "labels": LABELS[0, :T], "attention_mask": np.arange(T) < 20}
    rows = datasets.Dataset.from_list([row, row])
    window = data_of(list(rows)).train[0][0][0]
    hf = GPT2LMHeadModel(
        GPT2Config(vocab_size=257, n_positions=T, n_embd=16, n_layer=1, n_head=1)
    ).eval()
    labels = np.where(row["attention_mask"], row["labels"], -100)
    expected = hf(torch.tensor(row["input_ids"])[None], labels=torch.tensor(labels)[None]).loss
    logits = hf(torch.from_numpy(window[0])[None]).logits[0]
    actual = torch.nn.functional.cross_entropy(logits, torch.from_numpy(window[1]))
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert window.shape == (3, T)


REFUSED = [
    (torch.utils.data.DataLoader([1]), "the dataset of a DataLoader"),
    ({"input_ids": [[1, 2]]}, "not __len__ and __getitem__"),
    ([1, 2, 3], "shapes of its parts"),
    (None, "then the source for training"),
    ([{"input_ids": [1, 2], "text": "a"}], "the columns are input_ids, text"),
    ([np.ones(T + 1)], "give integers"),
    ([np.full(T + 1, 257)], "token ids that are not from 0 to 256"),
    ([np.full(T + 1, -1)], "token ids that are not from 0 to 256"),
    ([ROW[0], ROW[0, :9]], "window 1 has the shape"),
    ([(ROW[0], ROW[0, 1:])], "shapes of its parts"),
    ([(ROW[0, 1:], np.full(T, -1))], "neither these nor -100"),
    ([], r"__len__ that returns 0: return an integer from 1 to 2\^62"),
    (Drawn(3.5), "returns 3.5"),
    (Drawn(2**70), "returns 1180591620717411303424"),
    (Drawn(draw=lambda i: np.random.randint(9, size=T + 1)), "read again"),
    (Drawn(2, draw=lambda i: (ROW[0, 1:], [ROW, LABELS][i][0, 1:])), r"counts\(i\), or make it"),
]


@pytest.mark.parametrize(("source", "words"), REFUSED)
def test_a_source_that_cannot_be_trained_on_is_refused(source, words):
    with refused(words):
        data_of(source)


def test_windows_that_change_later_end_the_run_with_a_checkpoint(tiny, tmp_path):
    source = Drawn(draw=lambda i: np.arange(T + 1) if i < 9 else np.arange(T))
    with refused("window .* has the shape"):
        train(tiny(max_steps=20), data=data_of(source))
    assert list(tmp_path.glob("checkpoint-*/training_state/state.json"))


def test_a_run_on_a_source_resumes_exactly_and_names_its_data(tiny, tmp_path):
    config = tiny("run", save_every=4, eval_every=4)
    train(config, data=own_data)
    saved = read_json(tmp_path / "run/run.json")
    assert saved["data"] == "made up"
    assert saved["parts"]["data"] == "made up"
    assert "made up" in (tmp_path / "run/README.md").read_text()
    assert "val/bits_per_byte" not in metrics(tmp_path / "run")[-1]
    checkpoint = str(tmp_path / "run/checkpoint-4")
    reset_accelerate()
    train(tiny("more", save_every=4, eval_every=4, resume_from=checkpoint), data=own_data)
    assert weights_digest(tmp_path / "more") == weights_digest(tmp_path / "run")
    reset_accelerate()
    with refused("was trained with other data"):
        train(tiny("other", resume_from=checkpoint), data=data_of(Uneven(seed=5)))


@pytest.mark.parametrize("how", ["two processes", pytest.param("FSDP2", marks=long)])
def test_a_source_gives_the_same_losses_on_several_processes(how, tiny, data_dir, tmp_path):
    """Uneven targets count once, also where a micro-batch has none: a fourth of the windows."""
    settings = {"max_steps": 3, "eval_every": 3}
    train(tiny("one", **settings), data=own_data)
    config = tiny_config(data_dir, tmp_path / "two", micro_batch_size=1, **settings)
    flags = ("tests/seams_script.py", *as_flags(config))
    if how == "FSDP2":
        sharded(*flags, CASE="source")
    else:
        launch(*flags, processes=2, CASE="source")
    for name in ("train/loss", "val/loss"):
        one, two = (
            [line[name] for line in metrics(tmp_path / folder) if name in line]
            for folder in ("one", "two")
        )
        assert two == pytest.approx(one, abs=1e-5)


@long
def test_a_source_that_is_slower_than_the_run_gets_one_line(tiny, capsys):
    def slow(i):
        time.sleep(0.02)
        return np.arange(T + 1)

    train(tiny(max_steps=150), data=data_of(Drawn(draw=slow)))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "the data is slow" in line]
    made = int(re.search("gives ([0-9]+) windows/s", line)[1])
    assert 20 <= made <= 50


def test_an_endless_source_needs_no_memory():
    batch = next(loader(Drawn(size=2**62)).update(0, 4))
    assert batch.input_ids.shape == (4, T)
    assert len({tuple(row) for row in batch.input_ids.tolist()}) == 4
    val = EvalLoader(data_of(Drawn(2**62)).train, sequence_length=T, batch_size=2, max_tokens=256)
    assert val.windows == 8
