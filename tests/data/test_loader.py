"""Mixtures and the document mask."""

import json
import os
import shutil
import time

import numpy as np
import pytest
from conftest import losses, make_text, read_json, refused, reset_accelerate, run, tiny_config

from gpt2_accel.data.loader import EvalLoader, TrainLoader
from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.order import PERIOD, locate, locate_phases
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.source import open_data
from gpt2_accel.tokenizer import byte_tokenizer, char_tokenizer
from gpt2_accel.train import train

# Mixtures


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A mixture, 3 to 1, of a small data set in lower case and a large one in upper case."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, count in (("small", 10), ("LARGE", 60)):
        texts = [make_text(120, seed) for seed in range(count)]
        texts = [text.upper() for text in texts] if name == "LARGE" else texts
        splits = {"train": texts, "val": texts[:3]}
        prepare(splits, byte_tokenizer(), folder / name, source=name)
    write_mixture(folder / "mix", {str(folder / "small"): 3, str(folder / "LARGE"): 1})
    return folder / "mix"


def mixture_loader(data_dir, **changes):
    settings = {"sequence_length": 16, "micro_batch_size": 4, "seed": 1} | changes
    return TrainLoader(open_data(data_dir).split("train"), **settings)


PHASES = [(0, (0.7, 0.3, 0.0)), (2500, (0.1, 0.1, 0.8)), (6000, (0.0, 0.5, 0.5))]


def test_the_weights_of_a_mixture_change_over_the_run():
    """Counts are exact to two at borders and at multiples of a period after; none is left out."""
    positions = np.arange(12_144)
    sets, places = locate_phases(positions, PHASES, 5)
    for number in range(3):
        order = places[sets == number]
        assert sorted(order.tolist()) == list(range(len(order)))
        ends = [start for start, _ in PHASES[1:]] + [12_144]
        for (start, weights), end in zip(PHASES, ends, strict=True):
            here = np.cumsum(sets[start:end] == number)
            for n in [
                *range(PERIOD, end - start, PERIOD),
                *([end - start] if end < 12_144 else []),
            ]:
                wanted = weights[number] * n
                assert abs(here[n - 1] - wanted) <= 2, (number, start, n)
    some = np.array([12_143, 0, 2499, 2500, 7000])
    assert np.array_equal(locate_phases(some, PHASES, 5), (sets[some], places[some]))
    one = locate_phases(positions, PHASES[:1], 5)
    assert np.array_equal(one, locate(positions, PHASES[0][1], 5))


def test_a_run_keeps_the_phases_of_its_first_start(mixed, tmp_path):
    small, large = str(mixed.parent / "small"), str(mixed.parent / "LARGE")
    write_mixture(tmp_path / "mix", {small: 1, large: 1}, [(0.5, {large: 1})])
    settings = {"save_every": 4, "lr_schedule": "constant"}
    seen = []

    class Seen:
        def on_step_end(self, run, skipped):
            first = run.schedule.first(run.step - 1)
            seen.append(run.train_loader.samples(first, 4)[:, 0].tolist())

    train(tiny_config(tmp_path / "mix", tmp_path / "run", **settings), callbacks=[Seen()])
    assert {0, 1} == {number for batch in seen[:4] for number in batch}
    assert seen[4:] == [[1] * 4] * 4
    longer = settings | {"max_steps": 16, "resume_from": str(tmp_path / "run/checkpoint-4")}
    reset_accelerate()
    whole = seen.copy()
    train(tiny_config(tmp_path / "mix", tmp_path / "longer", **longer), callbacks=[Seen()])
    assert seen[8:12] == whole[4:]
    other = tmp_path / "other"
    write_mixture(other, {small: 1, large: 1}, [(0.25, {large: 1})])
    reset_accelerate()
    with refused("was trained with other data"):
        train(tiny_config(other, tmp_path / "more", **longer))


def test_evaluation_reads_each_window_of_a_mixture_once_by_weights(mixed):
    settings = {"sequence_length": 16, "batch_size": 4, "max_tokens": 1600}
    seen = []
    for rank in range(2):
        parts = open_data(mixed).split("val")
        for _, targets, *_ in EvalLoader(parts, rank=rank, world_size=2, **settings):
            seen += [row.tolist() for row in targets if row[0] != -100]
    capital = sum(any(65 <= token <= 90 for token in row) for row in seen)
    assert len(seen) == 100
    assert capital == 25


def test_a_part_that_was_prepared_again_with_another_tokenizer_is_refused(mixed, tmp_path):
    folder = shutil.copytree(mixed.parent, tmp_path / "mixed")
    write_mixture(folder / "again", {str(folder / "small"): 1})
    shutil.rmtree(folder / "small")
    prepare({"train": ["abc " * 100]}, char_tokenizer("abc "), folder / "small", source="made up")
    with refused("small has another tokenizer"):
        mixture_loader(folder / "again")
    with refused("mix is a mixture itself"):
        write_mixture(tmp_path / "m", {str(mixed): 1})


# Attention within documents


def test_the_document_mask_changes_the_loss_and_does_not_depend_on_the_micro_batch(tiny):
    settings = {"eval_every": 3, "max_steps": 3, "total_batch_size": 512}
    plain = run(tiny("a", **settings))
    masked = run(tiny("b", document_mask=True, **settings))
    again = run(tiny("c", document_mask=True, micro_batch_size=1, **settings))
    assert losses(masked) != losses(plain)
    assert losses(again) == pytest.approx(losses(masked), abs=1e-5)
    assert again[-1]["val/loss"] == pytest.approx(masked[-1]["val/loss"], abs=1e-5)


def test_13_000_shards_open_fast_with_few_open_files(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "d")
    file = tmp_path / "d/manifest.json"
    manifest = read_json(file)
    train = manifest["splits"]["train"]
    train["shards"] *= 13_000
    train["tokens"] *= 13_000
    file.write_text(json.dumps(manifest))
    begun = time.process_time()
    loader = mixture_loader(file.parent)
    assert time.process_time() - begun < 1
    assert len(list(loader.update(0, 800))) == 200
    assert len(os.listdir("/proc/self/fd")) < 300
