"""A resumed run equals one that was not interrupted, to the bit."""

import shutil

import pytest
from conftest import long, losses, make_text, metrics, run, tiny_config, weights_digest, write_lines
from interrupted import finish, repeatable
from tables import table

from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.runtime.files import digest, read_json_lines
from gpt2_accel.tokenizer import byte_tokenizer

FIRST, *MORE = table("reliability/exact_resume")
EXACT = [FIRST, *(pytest.param(case, marks=long) for case in MORE)]


@pytest.fixture(scope="module")
def short_data(tmp_path_factory):
    """76 windows of 32 tokens to train on, 8 for validation, since bf16 is slow on some CPUs."""
    path = tmp_path_factory.mktemp("short") / "words"
    splits = {"train": [make_text(150, seed) for seed in range(4)], "val": [make_text(60, 100)]}
    prepare(splits, byte_tokenizer(), path, source="made up")
    return path


@pytest.mark.parametrize("case", EXACT, ids=lambda case: "-".join(map(str, case)))
def test_a_resumed_run_is_bit_identical(short_data, tmp_path, times, case):
    processes, micro_batches, precision, backend, optimizer, cut = case
    sequences = 16 if cut == "across epochs" else 4
    settings = {
        "n_layer": 2 if backend == "no" else times(1, 2),  # compilation takes long
        "total_batch_size": sequences * 32,
        "micro_batch_size": sequences // micro_batches // processes,
        "max_steps": 12,
        "warmup_steps": 9 if cut == "warmup" else 2,
        "save_every": 6,
        "sample_every": 6,
        "eval_every": 3,
        "sample_tokens": 10,
        "dropout": 0.1,
        "optimizer": optimizer,
        "deterministic": backend != "no",
    }
    launcher_flags = ("--mixed_precision", precision, "--dynamo_backend", backend)

    def complete(folder, **changes):
        config = tiny_config(short_data, tmp_path / folder, **settings, **changes)
        finish(config, *launcher_flags, processes=processes)

    complete("whole")
    how = f"on {processes} x cpu, {precision.replace('no', 'fp32')}, compile backend {backend}"
    assert how in (tmp_path / "whole.log").read_text()
    windows = read_manifest(short_data)["splits"]["train"]["tokens"] // 32
    assert (sequences * 6 > windows) == (cut == "across epochs")
    shutil.copytree(tmp_path / "whole/checkpoint-6", tmp_path / "cut/checkpoint-6")
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = read_json_lines(tmp_path / "whole" / name)
        write_lines(tmp_path / "cut" / name, [entry for entry in lines if entry["step"] <= 6])
    complete("cut", resume_from="latest")
    assert weights_digest(tmp_path / "cut") == weights_digest(tmp_path / "whole")
    state = "checkpoint-12/training_state/optimizer.safetensors"
    assert digest(tmp_path / "cut" / state) == digest(tmp_path / "whole" / state)
    assert repeatable(tmp_path / "cut") == repeatable(tmp_path / "whole")


def test_a_run_resumes_on_any_number_of_processes(tiny, tmp_path, times):
    settings = {"total_batch_size": 8 * 32, "save_every": 2, "max_steps": 4, "keep_last": 9}
    uninterrupted = losses(run(tiny("whole", **settings)))
    two = tiny("two", micro_batch_size=2, **settings)
    finish(two, processes=2)
    checkpoint = str(tmp_path / "two/checkpoint-2")
    for processes, micro_batch_size in ((1, 8), (1, 1), (4, 2))[: times(1, 3)]:
        folder = tmp_path / f"on-{processes}-{micro_batch_size}"
        config = tiny(folder, micro_batch_size=micro_batch_size, resume_from=checkpoint, **settings)
        finish(config, processes=processes)
        resumed = losses(metrics(folder))
        assert resumed == pytest.approx(uninterrupted[2:], abs=1e-5), (processes, micro_batch_size)
