"""Trackers: the steps, settings and errors that reach them, also over a kill and a resume."""

import importlib.util
import signal
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from conftest import as_flags, long, read_json, refused, run, status
from launching import Started, wait_for

from gpt2_accel.config import TRACKERS
from gpt2_accel.runtime import trackers
from gpt2_accel.runtime.files import read_json_lines

MISSING = [name for name in TRACKERS if importlib.util.find_spec(name) is None]
needs_all = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture
def offline(monkeypatch):
    """Makes trackers work without a network and write into the tests' folders only."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # left by another test's run


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


@long
@needs_all
def test_a_killed_and_resumed_run_is_one_curve(tiny, tmp_path, offline):
    settings = {"report_to": ["tensorboard"], "resume_from": "latest"}
    config = tiny("run", max_steps=160, save_every=50, **settings)
    log = tmp_path / "run/metrics.jsonl"
    options = {"log": tmp_path / "log", "ACCELERATE_USE_CPU": "true"}
    process = Started("tests/train_script.py", *as_flags(config), **options)
    wait_for((tmp_path / "run/checkpoint-50").exists)
    wait_for(lambda: read_json_lines(log)[-1]["step"] >= 80)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)  # TensorBoard orders its files by the second
    steps = list(range(1, 161))
    assert [entry["step"] for entry in run(config)] == steps
    # The steps after the checkpoint are purged.
    assert tensorboard_steps(tmp_path / "run/tensorboard/updates", "train/loss") == steps


def test_wandb_has_one_id_over_resumes_and_gets_each_step_at_once(tiny, tmp_path, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = {"report_to": ["wandb"], "resume_from": "latest", "lr_schedule": "constant"}
    for max_steps in (4, 6):
        run(tiny("run", max_steps=max_steps, save_every=4, **settings))
    for call in wandb.init.call_args_list:
        assert call.kwargs["id"] == read_json(tmp_path / "run/run.json")["run_id"]
        assert call.kwargs["resume"] == "allow"
        assert call.kwargs["config"]["learning_rate"] == 1e-2
    logged = [call.kwargs for call in wandb.init.return_value.log.call_args_list]
    assert logged == [{"step": step, "commit": True} for step in range(1, 7)]


def test_a_missing_tracker_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with refused("pip install 'trackio"):
        run(tiny("run", report_to=["trackio"]))
    run_status = status(tmp_path / "run")
    assert run_status["state"] == "failed"
    assert "trackio" in run_status["reason"]


@needs_all
def test_training_continues_without_a_tracker_that_fails(
    tiny, tmp_path, offline, monkeypatch, capsys
):
    def fail(self, values, step=None, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(trackers.TrackioTracker, "log", fail)
    config = tiny("run", report_to=["trackio", "tensorboard"])
    assert len(run(config)) == 8
    assert capsys.readouterr().out.count("trackio failed and gets no more steps: no space") == 1
    assert len(tensorboard_steps(tmp_path / "run/tensorboard/updates", "train/loss")) == 8
