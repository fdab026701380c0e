"""`status.json` and the speed of training."""

import json
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_status, metrics, run, status
from tables import table
from torch.distributed import DistError

import gpt2_accel.setup as building
import gpt2_accel.train as train_module
from gpt2_accel import callbacks
from gpt2_accel.checkpoint.find import SILENCE, read_status
from gpt2_accel.runtime import log
from gpt2_accel.runtime.log import RunLog, Status


def test_heartbeats_continue_during_a_long_update(tiny, tmp_path, monkeypatch, before_update):
    seen = []

    def slow(step):
        while step == 3 and not seen:
            time.sleep(0.01)
            during = read_status(tmp_path)
            if during["step"] == 3:
                seen.append(during)

    before_update(slow)
    monkeypatch.setattr(log, "HEARTBEAT", 0.05)
    run(tiny())
    assert seen[0]["state"] == "running"
    assert seen[0]["requeue"]
    assert_status(tmp_path, state="finished", step=8, requeue=False)
    after = read_status(tmp_path)
    time.sleep(0.1)
    assert read_status(tmp_path) == after


def test_a_run_without_heartbeat_counts_as_killed(trained, tmp_path):
    written = status(trained) | {"state": "running"}

    def status_after(silent):
        changed = {"time": (datetime.now(UTC) - silent).isoformat(timespec="seconds")}
        (tmp_path / "status.json").write_text(json.dumps(written | changed))
        return read_status(tmp_path)

    assert status_after(SILENCE / 2)["state"] == "running"
    killed = status_after(2 * SILENCE)
    assert killed["state"] == "killed"
    assert killed["step"] == 250
    assert killed["reason"].startswith("no heartbeat since 2")


@pytest.mark.parametrize("updates", [0, 3])
def test_a_run_that_lost_a_process_is_requeued_only_after_progress(updates, tmp_path):
    """The launcher then also sends SIGTERM to the others."""
    stop = SimpleNamespace(reason="SIGTERM")
    steps = iter((5, 5, 5 + updates, 5 + updates))
    with pytest.raises(DistError), Status(tmp_path, lambda: next(steps), stop):
        raise DistError("a peer is gone")
    assert_status(tmp_path, state="failed", requeue=updates > 0)


def test_logged_figures_are_means_since_the_last_line(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    run = RunLog(tmp_path, 0, 2, lambda step: 100 * step, 500.0).__enter__()
    for step in (1, 2):
        now[0] += 2
        run.advance(step)
        run.training({"loss": 1.0, "learning_rate": 0.1, "own": torch.tensor([step / 4])})
        run.evaluation({"task/score": np.float32(0.5)})
        run.write()
    last = metrics(tmp_path)[-1]
    assert last["train/tokens_per_second"] == 50.0
    assert last["train/mfu"] == 0.1
    assert last["train/own"] == 0.5
    assert last["task/score"] == 0.5


def test_the_speed_excludes_evaluations_samples_and_saves(tiny, tmp_path, monkeypatch):
    """An update of 128 tokens takes a second of a made-up clock."""
    now = [0.0]

    def slowed(owner, name, seconds):
        honest = getattr(owner, name)

        def call(*args, **kwargs):
            now[0] += seconds
            return honest(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    slowed(train_module, "accumulate_gradients", 1.0)
    slowed(building, "validation_loss", 50.0)
    slowed(callbacks, "save", 50.0)
    every = {"log_every": 5, "eval_every": 2, "sample_every": 3, "save_every": 3}
    every |= {"sample_tokens": 2, "eval_tokens": 128}
    for updates in (6, 9):
        run(tiny(max_steps=updates, resume_from="latest", **every))
    lines = [line for line in metrics(tmp_path) if "train/seconds" in line]
    assert [line["train/seconds"] for line in lines] == [1, 5, 6, 9]
    assert now[0] > 350
    assert {line["train/tokens_per_second"] for line in lines} == {128}


@pytest.mark.parametrize(
    ("used", "own", "threads", "words"), table("runtime/cases")["slow from the start"]
)
def test_a_run_that_is_slow_from_its_start_says_why(
    used, own, threads, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(log.psutil.Process, "cpu_percent", lambda self: 100 * own)
    monkeypatch.setattr(log.psutil, "cpu_percent", lambda: 100 * used / 8)
    monkeypatch.setattr(log.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(log.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(log, "usable_cpus", lambda: 8)
    monkeypatch.setattr(log, "LOOK", 0)
    with RunLog(tmp_path, 0, 2, int, None, threads) as run:
        run.explain(1.0)
        run.explain(1.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(words) and words in str(lines)
