"""Writing, rotating and resuming checkpoints; `reliability/` tests faults."""

import errno
import json
import os
from pathlib import Path

import pytest
from conftest import refused, run, status, weights_digest

from gpt2_accel.checkpoint.find import list_checkpoints


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


@pytest.mark.parametrize("load", [False, True])
def test_keep_best_and_keep_every_keep_their_checkpoints(load, tiny, tmp_path, capsys):
    settings = {"max_steps": 6, "save_every": 2, "eval_every": 2, "keep_last": 1, "keep_every": 4}
    # With this learning rate the validation loss rises after the first updates.
    settings |= {"keep_best": not load, "load_best_model_at_end": load}
    settings |= {"learning_rate": 0.3, "warmup_steps": 0, "lr_schedule": "constant"}
    metrics = run(tiny(**settings))
    evaluated = {entry["step"]: entry["val/loss"] for entry in metrics if "val/loss" in entry}
    best = min(evaluated, key=evaluated.get)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in sorted({4, 6, best})]
    assert (tmp_path / "best").resolve().name == f"checkpoint-{best}"
    assert (tmp_path / "best/config.json").is_file()
    assert best < 6
    model = "best" if load else "latest"
    assert weights_digest(tmp_path) == weights_digest(tmp_path / model)
    words = f"checkpoint-{best}, which has the lowest val/loss"
    assert (words in (tmp_path / "README.md").read_text()) == load
    last = "" if load else f"the last update, 6; {tmp_path}/best has that of "
    assert f"{tmp_path}, that of {last}{words}" in capsys.readouterr().out


def test_training_continues_if_an_old_checkpoint_cannot_be_removed(tiny, tmp_path, monkeypatch):
    rename = Path.rename

    def busy(path, target):
        if path.name == "checkpoint-2":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    assert len(run(tiny(save_every=2, keep_last=1))) == 8
    assert status(tmp_path)["state"] == "finished"
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"]


def test_checkpoints_of_an_earlier_run_are_not_overwritten(tiny, tmp_path):
    """By a new run, and by one that resumes from an older checkpoint."""
    run(tiny(save_every=4))
    for resume_from in (None, str(tmp_path / "checkpoint-4")):
        with refused("holds checkpoint-8 of an earlier run"):
            run(tiny(resume_from=resume_from))


def test_the_metrics_of_a_checkpoint_are_on_disk_before_it_has_its_name(
    tiny, tmp_path, monkeypatch
):
    log = tmp_path / "metrics.jsonl"
    rename = Path.rename
    synced = [0]
    held = []

    def fsync(file):
        if log.exists() and os.path.samestat(os.fstat(file), log.stat()):
            synced.append(log.stat().st_size)

    def noted(self, target):
        if target.name[-1].isdigit():
            lines = log.read_bytes()[: synced[-1]].splitlines()
            held.append((target.name, json.loads(lines[-1])["step"]))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", noted)
    run(tiny(save_every=4))
    assert held == [("checkpoint-4", 4), ("checkpoint-8", 8)]
