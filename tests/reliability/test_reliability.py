"""Fault injection: kills, full disks, damaged files, bad gradients and a Hub that never answers.

`make test-reliability` sets `RELIABILITY=long` and tries each fault many times; `make test` tries it a few times.
"""

import hashlib
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    as_flags,
    chat_rows,
    long,
    losses,
    make_text,
    metrics,
    run,
    status,
    tiny_config,
    write_lines,
)
from hub_server import TOKEN, Hub
from launching import ROOT, Started, ask, python, wait_for

import gpt2_accel.finish as finish_module
import gpt2_accel.train as train_module
from gpt2_accel.checkpoint.find import find_checkpoint, list_checkpoints
from gpt2_accel.checkpoint.manifest import find_corruption
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.shards import read_manifest, verify_data
from gpt2_accel.files import digest, read_json_lines
from gpt2_accel.runtime.signals import ECHO, GRACE
from gpt2_accel.tokenizer import byte_tokenizer

SCRIPT = str(ROOT / "tests/train_script.py")
SLOW_SCRIPT = str(ROOT / "tests/reliability/slow_main_process.py")
KILLING_SCRIPT = str(ROOT / "tests/reliability/kill_at_operation.py")


def start(config, *launcher_flags, processes=1, script=SCRIPT, launch="cpu", **env) -> Started:
    """Starts a run in forked processes. `launch` names the launch config."""
    log = Path(f"{config.output_dir}.log")
    command = [*launcher_flags, script, *as_flags(config)]
    return Started(*command, processes=processes, log=log, config=launch, **env)


def finish(config, *launcher_flags, **how) -> None:
    """Runs to the end in other processes."""
    code = start(config, *launcher_flags, **how).wait(300)
    assert code == 0, Path(f"{config.output_dir}.log").read_text()


def last_step(folder) -> int:
    return max((entry["step"] for entry in metrics(folder)), default=0)


def weights(folder) -> str:
    return digest(Path(folder) / "model.safetensors")


def test_a_run_killed_at_random_times_equals_an_uninterrupted_one(tiny, tmp_path, times):
    kills, rng = times(2, 60), random.Random(0)
    settings = {"max_steps": times(100, 5000), "save_every": 7, "dropout": 0.1}
    settings |= {"resume_from": "latest", "eval_every": 50}
    config, killed = tiny("killed", **settings), 0
    for _ in range(kills):
        before = last_step(tmp_path / "killed")
        process = start(config)
        while last_step(tmp_path / "killed") <= before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:  # the run had ended before the kill
            break
        killed += 1
    assert killed >= times(1, 50)
    # In other processes with the same number of threads, which determines the order of additions.
    finish(config)
    config = tiny("whole", **settings)
    finish(config)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    resumed, whole = (metrics(tmp_path / folder) for folder in ("killed", "whole"))
    assert losses(resumed) == losses(whole)
    assert [entry["step"] for entry in resumed] == [entry["step"] for entry in whole]


def killed_before_each(start, step, ends=0) -> Iterator[int]:
    """Yields 1, 1 + `step`, … as long as `start(number)`, a completed process, was killed before its change of that number on
    the disk. The last, which was not, has the exit code `ends`."""
    for number in itertools.count(1, step):
        code = start(number).returncode
        if code != -signal.SIGKILL:
            break
        yield number
    assert code == ends and number > 1


def test_a_kill_before_any_file_operation_of_a_save_loses_at_most_one_save(tiny, tmp_path, times):
    settings = {"max_steps": 6, "save_every": 2, "keep_last": 1, "keep_best": True, "eval_every": 2}
    settings |= {"resume_from": "latest"}

    def trained(kill_at, folder=None):
        config = tiny(folder or tmp_path / f"killed-{kill_at}", **settings)
        # From the second checkpoint on, so that there is an older one to lose.
        script = (KILLING_SCRIPT, kill_at, ".checkpoint-4.", SCRIPT)
        return python(*script, *as_flags(config), ACCELERATE_USE_CPU="true")

    def left(folder):
        return {path.name for path in folder.iterdir() if "checkpoint" in path.name}

    assert trained(0, tmp_path / "whole").returncode == 0
    for number in killed_before_each(trained, times(60, 1)):
        folder = tmp_path / f"killed-{number}"
        whole = [path for path in list_checkpoints(folder) if find_corruption(path) is None]
        assert whole, "a checkpoint was lost"
        assert trained(0, folder).returncode == 0
        assert weights(folder) == weights(tmp_path / "whole"), number
        assert left(folder) == left(tmp_path / "whole")
    assert number > 1


@pytest.mark.parametrize("what", ["text", "chat"])
def test_a_preparation_killed_before_any_file_operation_resumes(what, chat_base, tmp_path, times):
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / f"text/{i}.txt").write_text(make_text(300, i))
    write_lines(tmp_path / "rows.jsonl", chat_rows(60))
    args = ["text", tmp_path / "text", "--tokenizer", "bytes", "--workers", 1]
    if what == "chat":
        args = ["chat", tmp_path / "rows.jsonl", "--model", chat_base, "--sequence_length", 64]
    place = times("manifest.json", "d.partial")  # from the cleanup on, or from the start

    def prepared(kill_at, folder=None):
        folder = folder or tmp_path / f"killed-{kill_at}"
        script = (KILLING_SCRIPT, kill_at, place, ROOT / "recipes/prepare_data.py")
        rest = ("--shard_tokens", 1000, "--data_dir", folder / "d")
        return python(*script, *args, *rest)

    def left(folder):
        return {path.relative_to(folder) for path in folder.rglob("*")}

    assert prepared(0, tmp_path / "whole").returncode == 0
    for number in killed_before_each(prepared, times(10, 1)):
        folder = tmp_path / f"killed-{number}"
        assert prepared(0, folder).returncode == 0, number
        assert left(folder) == left(tmp_path / "whole")
        made, expected = (read_manifest(path / "d") for path in (folder, tmp_path / "whole"))
        assert made["splits"] == expected["splits"] and verify_data(folder / "d")
    assert number > 1


def test_a_full_disk_loses_only_the_saves_that_do_not_fit(tiny, tmp_path, small_disk, capsys):
    disk = small_disk(4)
    settings = {"save_every": 2, "keep_last": 1, "resume_from": "latest"}
    whole = run(tiny("whole", **settings))
    files = (tmp_path / "whole/checkpoint-8").rglob("*")
    size = sum(path.stat().st_blocks * 512 for path in files)
    (disk / "filler").write_bytes(bytes(4 * 2**20 - int(1.5 * size)))
    config = tiny(disk / "run", **settings)
    with pytest.raises(OSError, match="the last checkpoint could not be written"):
        run(config)
    said = "".join(capsys.readouterr())
    assert "checkpoint-4 could not be written, training continues" in said
    [checkpoint] = list_checkpoints(disk / "run")
    assert checkpoint.name == "checkpoint-2" and find_corruption(checkpoint) is None
    assert not list((disk / "run").glob(".checkpoint*"))
    assert status(disk / "run")["state"] == "failed"
    assert last_step(disk / "run") == 8  # training continued after the failed write
    (disk / "filler").unlink()
    resumed = run(config)
    assert losses(resumed) == losses(whole)
    assert weights(disk / "run") == weights(tmp_path / "whole")


def test_a_resume_writes_the_final_model_after_a_full_disk(data_dir, small_disk, monkeypatch):
    disk, left = small_disk(4), 0

    def fill(_):
        honest(_)
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(bytes(free - left))

    honest = finish_module.wait_for_checkpoint
    monkeypatch.setattr(finish_module, "wait_for_checkpoint", fill)
    config = tiny_config(data_dir, disk / "run", resume_from="latest")
    failed = 0
    while True:  # the disk fills up in the weights, the config, the card, the tokenizer
        try:
            run(config)
            break
        except OSError as error:
            assert "the final model could not be written to" in str(error)
            assert "--resume_from latest" in str(error)
        assert not (disk / "run/model.safetensors").exists()
        assert find_corruption(disk / "run/checkpoint-8") is None
        (disk / "filler").unlink()
        left, failed = left + (128 << 10 if not left else 4096), failed + 1
    assert failed > 5
    assert weights(disk / "run") == weights(disk / "run/checkpoint-8")


def test_a_resume_detects_and_skips_any_damaged_checkpoint(tiny, tmp_path, capsys, times):
    settings = {"save_every": 4, "resume_from": "latest"}
    whole = run(tiny("run", **settings))
    newest = tmp_path / "run/checkpoint-8"
    assert find_corruption(newest) is None
    shutil.copytree(tmp_path / "run/checkpoint-4", tmp_path / "copy")
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        content = path.read_bytes()
        positions = range(0, len(content), max(1, len(content) // times(5, 400)))
        for number, position in enumerate([*positions, len(content) - 1]):
            broken = bytearray(content)
            broken[position] ^= 1 << (number % 8)
            path.write_bytes(broken)
            assert find_corruption(newest), (path, position)
        for length in (0, len(content) // 2, len(content) - 1):
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
    assert losses(resumed) == losses(whole) and find_corruption(newest) is None
    # Rotation keeps the new checkpoint, not the damaged one with the higher step.
    (newest / "model.safetensors").write_bytes(b"")
    one = {**settings, "save_every": 2, "keep_last": 1, "max_steps": 6, "lr_schedule": "constant"}
    run(tiny("run", **one))
    assert find_corruption(tmp_path / "run/checkpoint-6") is None
    shutil.rmtree(tmp_path / "run/checkpoint-6")
    shutil.copytree(tmp_path / "copy", tmp_path / "run/checkpoint-4")
    with pytest.raises(ValueError, match="checkpoint-8 is damaged: .*config.json"):
        (newest / "config.json").write_text("{}")
        run(tiny("new", resume_from=str(newest)))
    with pytest.raises(ValueError, match="all checkpoints in .* are damaged"):
        (tmp_path / "run/checkpoint-4/config.json").write_text("{}")
        run(tiny("run", **settings))


@pytest.mark.parametrize(
    ("processes", "number"),
    [(2, signal.SIGTERM), (1, signal.SIGINT), (1, signal.SIGHUP)],  # the last: a closed terminal
)
def test_a_signal_ends_the_run_with_a_checkpoint(tiny, tmp_path, processes, number):
    settings = {"max_steps": 20_000, "total_batch_size": 8 * 32, "lr_schedule": "constant"}
    often = {"eval_every": 1} if processes > 1 else {}  # the signal arrives during an evaluation
    config = tiny("run", resume_from="latest", **settings, **often)
    process = start(config, processes=processes)
    wait_for(lambda: last_step(tmp_path / "run") > 20)
    os.kill(process.pids[-1], number)
    wait_for(lambda: status(tmp_path / "run")["state"] != "running", 30)
    process.wait(30)
    found = status(tmp_path / "run")
    name = signal.Signals(number).name
    told = name if processes == 1 else "a signal to another process"
    assert (found["state"], found["reason"]) == ("stopped", told)
    assert found["requeue"] == (number != signal.SIGINT)
    step = found["step"]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == [f"checkpoint-{step}"]
    more = {**settings, "max_steps": step + 5}
    resumed = run(tiny("run", resume_from="latest", **more))
    whole = run(tiny("whole", **more))
    assert losses(resumed)[step:] == pytest.approx(losses(whole)[step:], abs=1e-4)


def test_a_second_ctrl_c_stops_immediately(tiny, tmp_path, before_update):
    """Not its echo, which the launcher passes on at once."""

    def endless(step):
        if step == 7:
            for pause in (0, ECHO + 0.1, 60):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(pause)
            raise AssertionError("the second Ctrl-C did not stop the run")

    before_update(endless)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(save_every=5))
    found = status(tmp_path)
    assert (found["state"], found["reason"]) == ("stopped", "SIGINT, twice") and not found[
        "requeue"
    ]
    [checkpoint] = list_checkpoints(tmp_path)
    assert checkpoint.name == "checkpoint-5" and find_corruption(checkpoint) is None


@pytest.mark.parametrize(("rank", "state"), [(0, "running"), (1, "failed")])
def test_a_run_whose_process_was_killed_asks_for_a_requeue(tiny, tmp_path, rank, state):
    config = tiny("run", micro_batch_size=2, max_steps=10**5, lr_schedule="constant")
    process = start(config, processes=2)
    wait_for(lambda: last_step(tmp_path / "run") > 5)
    os.kill(process.pids[rank], signal.SIGKILL)
    process.wait(60)
    found = status(tmp_path / "run")
    assert found["state"] == state and found["requeue"], found


def poison(monkeypatch, bad, factor=math.nan):
    """Multiplies the gradients of the updates in `bad`. With NaN their loss is NaN as well."""
    honest = train_module.accumulate_gradients

    def accumulate(accelerator, model, loader, first, sequences, interrupted):
        loss = honest(accelerator, model, loader, first, sequences, interrupted)
        if first // sequences in bad:
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            loss = loss + 0 * factor
        return loss

    monkeypatch.setattr(train_module, "accumulate_gradients", accumulate)


def test_non_finite_updates_never_change_the_weights(tiny, tmp_path, monkeypatch):
    settings = {
        "max_steps": 12,
        "save_every": 6,
        "resume_from": "latest",
        "lr_schedule": "constant",
    }
    with monkeypatch.context() as patch:
        poison(patch, {3, 4})
        history = run(tiny("some", **settings))
    skipped = [entry for entry in history if "skipped" in entry]
    saved = [path.name for path in list_checkpoints(tmp_path / "some")]
    assert saved == ["checkpoint-6", "checkpoint-12"]
    assert [entry["step"] for entry in skipped] == [4, 5]
    assert skipped[0]["skipped"] == "the loss is nan" and len(skipped[0]["samples"]) == 4
    assert all(entry["train/loss"] < 6 for entry in history if "skipped" not in entry)
    assert status(tmp_path / "some")["state"] == "finished"

    before = run(tiny("before", **{**settings, "max_steps": 7}))
    settings["save_every"] = 1
    with monkeypatch.context() as patch:
        poison(patch, range(7, 99))
        with pytest.raises(
            ValueError, match=r"5 updates in a row were skipped.*resume from checkpoint-7"
        ):
            run(tiny("many", **settings))
    assert status(tmp_path / "many")["state"] == "failed"
    saved = tmp_path / "many/checkpoint-7/model.safetensors"
    assert digest(saved) == weights(tmp_path / "before")
    assert len(metrics(tmp_path / "many")) == 12
    # Once the cause is gone, a resume continues from there, not from between the bad updates.
    assert find_checkpoint("latest", tmp_path / "many").name == "checkpoint-7"
    assert (tmp_path / "many/latest").resolve().name == "checkpoint-7"
    resumed = run(tiny("many", **settings))
    assert losses(resumed)[:7] == losses(before) and len(resumed) == 12


def test_spike_z_skips_a_spike_also_after_a_resume(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, {115}, 1000)
    settings = {"max_steps": 120, "spike_z": 30.0, "save_every": 60, "keep_last": 9}
    whole = run(tiny("whole", **settings))
    [skipped] = [entry for entry in whole if "skipped" in entry]
    assert skipped["step"] == 116 and "the gradient norm is" in skipped["skipped"]
    # The window of recent values is resumed too.
    resumed = run(
        tiny(
            "resumed",
            resume_from=str(tmp_path / "whole/checkpoint-60"),
            **settings,
        )
    )
    assert [entry["step"] for entry in resumed if "skipped" in entry] == [116]
    assert weights(tmp_path / "resumed") == weights(tmp_path / "whole")


POINTS = ("/api/repos/create", "/preupload/", "/info/lfs/", "PUT /lfs/", "/commit/")
ENDS = ("stopped", "complete", "complete, signalled twice")


@long
@pytest.mark.parametrize(("point", "end"), list(zip(POINTS, itertools.cycle(ENDS))))
def test_a_hub_that_never_answers_loses_only_the_upload(tiny, tmp_path, point, end):
    settings = {"push_to_hub": "user/name", "hub_strategy": "checkpoint", "save_every": 4}
    settings |= {"lr_schedule": "constant"}
    settings["max_steps"] = 10**5 if end == "stopped" else 8
    config = tiny("run", **settings)
    with Hub() as hub, (tmp_path / "log").open("w") as log:
        hub.hangs = point
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *as_flags(config)],
            cwd=ROOT,
            env=os.environ | env | {"ACCELERATE_USE_CPU": "true"},
            stdout=log,
            stderr=log,
        )
        try:
            wait_for(lambda: any(point in request for request in hub.requests), 120)
            if end != "stopped":
                wait_for(lambda: status(tmp_path / "run")["state"] == "finished")
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            if end == "complete, signalled twice":
                time.sleep(3)
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            took = time.monotonic() - asked
        finally:
            process.kill()
    assert took < (12 if end == "complete, signalled twice" else GRACE + 9)
    found = status(tmp_path / "run")
    stopped = end == "stopped"
    assert (found["state"], found["requeue"]) == ("stopped" if stopped else "finished", stopped)
    newest = list_checkpoints(tmp_path / "run")[-1]
    assert newest.name == f"checkpoint-{found['step']}" and find_corruption(newest) is None
    assert stopped or weights(tmp_path / "run") == weights(newest)


@long
def test_slow_work_of_the_main_process_does_not_time_out_the_others(tiny, tmp_path):
    settings = {"micro_batch_size": 2, "max_steps": 3, "save_every": 1}
    settings |= {"push_to_hub": "user/name", "hub_strategy": "end"}
    config = tiny("run", **settings)
    with Hub() as hub:
        hub.gate.clear()
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        log = tmp_path / "log"
        process = Started(SLOW_SCRIPT, *as_flags(config), processes=2, log=log, **env)
        wait_for(lambda: None not in (codes := ask({"poll": process.pids}))[1:] or any(codes), 200)
        assert ask({"poll": process.pids}) == [None, 0], log.read_text()
        assert status(tmp_path / "run")["state"] == "finished"
        time.sleep(20)
        assert process.poll() is None
        hub.gate.set()
        assert process.wait(60) == 0, log.read_text()
        uploaded = hub.files("user/name")["model.safetensors"]
        assert hashlib.sha256(uploaded).hexdigest() == weights(tmp_path / "run")


# Pairwise combinations of processes, micro-batches per update, precision, compilation, optimizer, interruption point.
EXACT = [
    (1, 2, "bf16", "aot_eager", "muon", "across epochs"),
    (1, 1, "bf16", "no", "muon", "warmup"),
    (2, 2, "no", "no", "muon", "warmup"),
]
MORE = [
    (1, 1, "no", "no", "adamw", "mid-epoch"),
    (2, 1, "bf16", "aot_eager", "adamw", "mid-epoch"),
    (2, 1, "no", "no", "adamw", "across epochs"),
    (1, 2, "bf16", "inductor", "muon", "long"),
    (2, 1, "bf16", "inductor", "adamw", "long"),
]
EXACT += [pytest.param(case, marks=long) for case in MORE]


@pytest.fixture(scope="module")
def short_data(tmp_path_factory):
    """76 windows of 32 tokens to train on, 8 for validation: bf16 is slow on CPUs without bf16 units."""
    path = tmp_path_factory.mktemp("short") / "words"
    splits = {"train": [make_text(150, seed) for seed in range(4)], "val": [make_text(60, 100)]}
    prepare(splits, byte_tokenizer(), path, source="made up")
    return path


@pytest.mark.parametrize("case", EXACT, ids=lambda case: "-".join(map(str, case)))
def test_a_resumed_run_is_bit_identical(data_dir, short_data, tmp_path, times, case):
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
    env = {}
    if cut == "long":  # long sequences: the loss is computed in chunks of rows
        long = {"n_positions": 320, "dropout": 0.0, "total_batch_size": 4 * 320}
        settings |= long | {"micro_batch_size": 4 // micro_batches // processes}
        env["LOGITS_AT_ONCE"] = str(100 * 384)

    def complete(folder, **changes):
        data = data_dir if cut == "long" else short_data
        config = tiny_config(data, tmp_path / folder, **settings, **changes)
        finish(config, *launcher_flags, processes=processes, **env)

    complete("whole")
    said = (tmp_path / "whole.log").read_text()
    assert (
        f"on {processes} x cpu, {precision.replace('no', 'fp32')}, compile backend {backend}"
        in said
    )
    windows = read_manifest(short_data)["splits"]["train"]["tokens"] // 32
    assert (sequences * 6 > windows) == (cut == "across epochs")
    shutil.copytree(tmp_path / "whole/checkpoint-6", tmp_path / "cut/checkpoint-6")
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = read_json_lines(tmp_path / "whole" / name)
        write_lines(tmp_path / "cut" / name, [entry for entry in lines if entry["step"] <= 6])
    complete("cut", resume_from="latest")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    state = "checkpoint-12/training_state/optimizer.safetensors"
    assert digest(tmp_path / "cut" / state) == digest(tmp_path / "whole" / state)
    for name in ("metrics.jsonl", "samples.jsonl"):
        histories = [read_json_lines(tmp_path / folder / name) for folder in ("cut", "whole")]
        for entry in (entry for history in histories for entry in history):
            for measured in ("tokens_per_second", "seconds", "memory_gb"):
                entry.pop(f"train/{measured}", None)
        assert histories[0] == histories[1], name


def test_a_run_resumes_on_any_number_of_processes(tiny, tmp_path, times):
    settings = {"total_batch_size": 8 * 32, "save_every": 6, "max_steps": 26, "keep_last": 9}
    whole = losses(run(tiny("whole", **settings)))
    two = tiny("two", micro_batch_size=2, **settings)
    finish(two, processes=2)
    checkpoint = str(tmp_path / "two/checkpoint-6")
    for processes, micro_batch_size in ((1, 8), (1, 1), (4, 2))[: times(2, 3)]:
        folder = tmp_path / f"on-{processes}-{micro_batch_size}"
        config = tiny(folder, micro_batch_size=micro_batch_size, resume_from=checkpoint, **settings)
        if processes == 1:
            run(config)
        else:
            finish(config, processes=processes)
        resumed = losses(metrics(folder))
        assert resumed == pytest.approx(whole[6:], abs=1e-5), (processes, micro_batch_size)
