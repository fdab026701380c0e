"""Fault injection: kills, full disks, damaged files and bad gradients.

`make test-reliability` sets `RELIABILITY=long` and tries each fault many times.
"""

import math
import shutil

import pytest
from conftest import (
    as_flags,
    chat_rows,
    long,
    losses,
    make_text,
    refused,
    run,
    status,
    tiny_config,
    weights_digest,
    write_lines,
)
from families import save_family
from interrupted import KILLING_SCRIPT, SCRIPT, killed_before_each, last_step
from launching import ROOT, python

import gpt2_accel.lifecycle as lifecycle
import gpt2_accel.train as train_module
from gpt2_accel.checkpoint.find import find_checkpoint, find_corruption, list_checkpoints
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.data.source import verify_data
from gpt2_accel.runtime.files import digest


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=long)])
def test_a_kill_before_any_file_operation_of_a_save_loses_at_most_one_save(
    lora, tiny, tmp_path, times
):
    """To the end of the final model; with LoRA from the adapter beside it on."""
    settings = {"max_steps": 6, "save_every": 2, "keep_last": 1, "keep_best": True, "eval_every": 2}
    settings |= {"resume_from": "latest", "lora": lora}
    if lora:
        settings["init_from"] = str(save_family("smollm3", tmp_path / "start"))

    def trained(kill_at, folder=None):
        config = tiny(folder or tmp_path / f"killed-{kill_at}", **settings)
        # From the second checkpoint on, so that there is an older one to lose.
        place = f"{config.output_dir}/adapter" if lora else ".checkpoint-4."
        script = (KILLING_SCRIPT, kill_at, place, SCRIPT)
        fails = None if kill_at else False
        return python(*script, *as_flags(config), fails=fails, ACCELERATE_USE_CPU="true")

    def left(folder):
        return {path.name for path in folder.iterdir() if "checkpoint" in path.name}

    def adapter(folder):
        return digest(folder / "adapter/adapter_model.safetensors")

    trained(0, tmp_path / "whole")
    for number in killed_before_each(trained, times(60, 8 if lora else 1)):
        folder = tmp_path / f"killed-{number}"
        intact = [path for path in list_checkpoints(folder) if find_corruption(path) is None]
        assert intact, "a checkpoint was lost"
        trained(0, folder)
        assert weights_digest(folder) == weights_digest(tmp_path / "whole"), number
        assert not lora or adapter(folder) == adapter(tmp_path / "whole")
        assert left(folder) == left(tmp_path / "whole")
    assert number > 1


@pytest.mark.parametrize("what", ["text", pytest.param("chat", marks=long)])
def test_a_preparation_killed_before_any_file_operation_resumes(what, chat_base, tmp_path, times):
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / f"text/{i}.txt").write_text(make_text(300, i))
    write_lines(tmp_path / "rows.jsonl", chat_rows(60))
    args = ["text", tmp_path / "text", "--tokenizer", "bytes", "--shard_tokens", 1000]
    if what == "chat":
        args = ["chat", tmp_path / "rows.jsonl", "--model", chat_base, "--sequence_length", 64]
    place = times("manifest.json", "d.partial")  # from the cleanup on, or from the start

    def prepared(kill_at, folder=None):
        folder = folder or tmp_path / f"killed-{kill_at}"
        script = (KILLING_SCRIPT, kill_at, place, ROOT / "recipes/prepare_data.py")
        fails = None if kill_at else False
        return python(*script, *args, "--data_dir", folder / "d", fails=fails)

    def left(folder):
        return {path.relative_to(folder) for path in folder.rglob("*")}

    prepared(0, tmp_path / "whole")
    for number in killed_before_each(prepared, times(10, 1)):
        folder = tmp_path / f"killed-{number}"
        prepared(0, folder)
        assert left(folder) == left(tmp_path / "whole")
        expected = read_manifest(tmp_path / "whole/d")
        assert read_manifest(folder / "d")["splits"] == expected["splits"]
        assert verify_data(folder / "d")
    assert number > 1


def test_a_full_disk_loses_only_the_saves_that_do_not_fit(tiny, tmp_path, small_disk, capsys):
    disk = small_disk(4)
    settings = {"save_every": 2, "resume_from": "latest"}
    uninterrupted = run(tiny("whole", **settings))
    files = (tmp_path / "whole/checkpoint-8").rglob("*")
    size = sum(path.stat().st_blocks * 512 for path in files)
    (disk / "filler").write_bytes(bytes(4 * 2**20 - int(1.5 * size)))
    config = tiny(disk / "run", **settings)
    with refused("the last checkpoint could not be written"):
        run(config)
    output = "".join(capsys.readouterr())
    for step in (4, 8):  # the run tries the last one again
        assert output.count(f": checkpoint-{step} could not be written: {disk}/run/") == 1
    [checkpoint] = list_checkpoints(disk / "run")
    assert checkpoint.name == "checkpoint-2"
    assert find_corruption(checkpoint) is None
    assert not list((disk / "run").glob(".checkpoint*"))
    assert status(disk / "run")["state"] == "failed"
    assert last_step(disk / "run") == 8  # training continued after the failed write
    (disk / "filler").unlink()
    assert losses(run(config)) == losses(uninterrupted)
    assert weights_digest(disk / "run") == weights_digest(tmp_path / "whole")


@long
def test_a_resume_writes_the_final_model_after_a_full_disk(data_dir, small_disk, monkeypatch):
    disk = small_disk(4)
    left = 0
    honest = lifecycle.end_write

    def fill(run):
        reported = honest(run)
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))
        return reported

    monkeypatch.setattr(lifecycle, "end_write", fill)
    config = tiny_config(data_dir, disk / "run", resume_from="latest")
    failed = 0
    complete = False
    # The disk fills up in the weights, the config, the card, the tokenizer, the manifest.
    while not complete:
        try:
            run(config)
            complete = True
        except OSError as error:
            assert "the final model could not be written to" in str(error)
            assert not (disk / "run/model.manifest.json").exists()
            assert find_corruption(disk / "run/checkpoint-8") is None
            (disk / "filler").unlink()
            failed += 1
            left = left + 4096 if left else 128 << 10
    assert failed > 5
    assert weights_digest(disk / "run") == weights_digest(disk / "run/checkpoint-8")


def test_a_resume_detects_and_skips_any_damaged_checkpoint(tiny, tmp_path, capsys, times):
    settings = {"save_every": 4, "resume_from": "latest"}
    uninterrupted = run(tiny("run", **settings))
    newest = tmp_path / "run/checkpoint-8"
    assert find_corruption(newest) is None
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        content = path.read_bytes()
        step = max(1, len(content) // times(5, 400))
        for position in [*range(0, len(content), step), len(content) - 1]:
            broken = bytearray(content)
            broken[position] ^= 1 << (position % 8)
            path.write_bytes(broken)
            assert find_corruption(newest), (path, position)
        for length in (0, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:length])
            assert find_corruption(newest), (path, length)
        path.unlink()
        assert find_corruption(newest), path
        path.write_bytes(content)
    assert find_corruption(newest) is None

    (newest / "model.safetensors").write_bytes(b"")
    (tmp_path / "run/model.safetensors").unlink()
    resumed = run(tiny("run", **settings))
    assert "checkpoint-8 is skipped: model.safetensors does not match" in capsys.readouterr().out
    assert losses(resumed) == losses(uninterrupted)
    assert find_corruption(newest) is None
    # Rotation keeps the new checkpoint, not the damaged one with the higher step.
    (newest / "model.safetensors").write_bytes(b"")
    one = settings | {"save_every": 2, "keep_last": 1, "max_steps": 6, "lr_schedule": "constant"}
    run(tiny("run", **one))
    assert find_corruption(tmp_path / "run/checkpoint-6") is None
    for path in list_checkpoints(tmp_path / "run"):
        (path / "config.json").write_text("{}")
    with refused("all checkpoints in .* are damaged"):
        run(tiny("run", **settings))


def poison(monkeypatch, bad, finite=()):
    """Makes gradients and losses of the updates in `bad` NaN; losses in `finite` stay."""
    honest = train_module.accumulate_gradients

    def accumulate(run, batches):
        figures = honest(run, batches)
        if run.step in bad:
            for parameter in run.model.parameters():
                parameter.grad.mul_(math.nan)
            if run.step not in finite:
                figures["loss"] *= math.nan
        return figures

    monkeypatch.setattr(train_module, "accumulate_gradients", accumulate)


def test_non_finite_updates_never_change_the_weights(tiny, tmp_path, monkeypatch):
    settings = {"max_steps": 12, "resume_from": "latest", "lr_schedule": "constant"}
    with monkeypatch.context() as patch:
        poison(patch, {3, 4}, finite={4})
        history = run(tiny("some", save_every=6, **settings))
    skipped = {line["step"]: line["skipped"] for line in history if "skipped" in line}
    assert skipped == {4: "the loss is nan", 5: "the gradient norm is nan"}
    assert len(history[3]["samples"]) == 4
    assert all(line["train/loss"] < 6 for line in history if "skipped" not in line)
    assert status(tmp_path / "some")["state"] == "finished"

    before = run(tiny("before", **settings | {"max_steps": 7}))
    config = tiny("many", save_every=1, **settings)
    with monkeypatch.context() as patch:
        poison(patch, range(7, 99))
        with refused(r"5 updates in a row were skipped.*resume from checkpoint-7"):
            run(config)
    assert status(tmp_path / "many")["state"] == "failed"
    # A resume continues from before the bad updates.
    newest = find_checkpoint("latest", tmp_path / "many")
    assert newest.name == "checkpoint-7"
    assert weights_digest(newest) == weights_digest(tmp_path / "before")
    resumed = run(config)
    assert losses(resumed)[:7] == losses(before)
    assert len(resumed) == 12
