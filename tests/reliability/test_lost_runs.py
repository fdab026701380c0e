"""No run is lost or wrong silently: two starts at once, signals, shards that change."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import (
    as_flags,
    assert_status,
    contents,
    long,
    metrics,
    refused,
    reset_accelerate,
    run,
    status,
    tiny_config,
)
from interrupted import (
    KILLING_SCRIPT,
    SCRIPT,
    killed_before_each,
    last_step,
    log_of,
    repeatable,
    start,
)
from launching import ROOT, launch, python, wait_for

from gpt2_accel.callbacks import Evaluations, Samples
from gpt2_accel.checkpoint.find import find_corruption, list_checkpoints, model_directory
from gpt2_accel.data.shards import HEADER
from gpt2_accel.evals import kept
from gpt2_accel.runtime import log
from gpt2_accel.runtime.files import lock_folder
from gpt2_accel.runtime.signals import ECHO
from gpt2_accel.train import train


def test_a_second_start_waits_for_the_first_and_changes_nothing(tiny, tmp_path):
    settings = {"max_steps": 600, "save_every": 200}
    first = tiny("run", **settings)
    second = tiny("run", **settings, resume_from="latest", learning_rate=0.1)
    a = start(first)
    wait_for(lambda: list_checkpoints(tmp_path / "run"))
    refused = python(SCRIPT, *as_flags(first), ACCELERATE_USE_CPU="true", fails=True)
    b = start(second)
    assert a.poll() is None, "the first run ended too soon for this test"
    assert "is in use by another process" in refused.stderr
    assert a.wait(120) == 0
    files = contents(tmp_path / "run")
    assert b.wait(120) == 1
    assert "is in use by another process: waiting for it" in log_of(second)
    assert "learning_rate 0.01 -> 0.1" in log_of(second)
    assert contents(tmp_path / "run") == files
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 601))


@pytest.mark.parametrize("save_every", [5, 0])
def test_a_run_whose_folder_is_gone_ends_and_writes_nothing_there(
    tiny, tmp_path, save_every, monkeypatch, before_update
):
    """Also without a checkpoint to save: the heartbeat looks. Another run has taken the name."""
    monkeypatch.setattr(log, "HEARTBEAT", 99 if save_every else 0.2)
    folder = tmp_path / "run"
    updates = []
    other = ExitStack()

    def act(step):
        updates.append(step)
        if step == 3:
            folder.rename(tmp_path / "moved")
            other.enter_context(lock_folder(folder))
        if not save_every:
            time.sleep(0.05)

    before_update(act)
    with other, refused("was removed or moved during the run"):
        run(tiny("run", max_steps=200, save_every=save_every))
    assert len(updates) < (6 if save_every else 100)
    assert [path.name for path in folder.glob("*")] == [".lock"]


def test_an_extended_run_gives_its_newest_weights(tiny, tmp_path):
    run(tiny(max_steps=4, save_every=4))
    assert Path(model_directory(tmp_path)) == tmp_path
    extended = {"max_steps": 60, "resume_from": "latest", "save_every": 6, "max_hours": 0.1 / 3600}
    run(tiny(**(extended | {"max_steps": 10**5, "lr_schedule": "constant"})))
    step = status(tmp_path)["step"]
    assert step > 4
    assert Path(model_directory(tmp_path)) == tmp_path / f"checkpoint-{step}"
    run(tiny(max_steps=step + 2, resume_from="latest"))
    assert Path(model_directory(tmp_path)) == tmp_path


@long
def test_a_kill_in_a_run_that_diverges_loses_no_checkpoint(tiny, tmp_path):
    """The last save of a run that diverges is of an older step than its newest update."""

    def diverged(kill_at):
        folder = tmp_path / f"killed-{kill_at}"
        config = tiny(folder, max_steps=99, save_every=4, keep_last=1)
        command = (KILLING_SCRIPT, kill_at, ".checkpoint-6.", "tests/seams_script.py")
        return python(*command, *as_flags(config), fails=None, CASE="diverges")

    for number in killed_before_each(diverged, 1, ends=1):
        saved = list_checkpoints(tmp_path / f"killed-{number}")
        assert saved
        assert all(find_corruption(path) is None for path in saved)
    # The run that was not killed keeps the checkpoint from before, and is told to resume from it.
    last_run = tmp_path / f"killed-{number + 1}"
    assert [path.name for path in list_checkpoints(last_run)] == ["checkpoint-4", "checkpoint-6"]
    assert "resume from checkpoint-6" in status(last_run)["reason"]


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [
        (Evaluations, "on_step_end", 3),
        (Evaluations, "on_step_end", 6),
        (Samples, "on_step_end", 6),
        (kept, "sample_base", 0),
    ],
)
def test_what_a_signal_prevents_is_made_at_the_next_start(
    owner, name, step, chat_base, tiny, tmp_path, monkeypatch
):
    """Also the last evaluation, which ends the run early."""
    settings = {"eval_every": 2, "sample_every": 3, "save_every": 4, "eval_tokens": 512}
    settings |= {"sample_prompts": ["a"], "learning_rate": 0.0, "patience": 2}
    settings |= {"init_from": str(chat_base), "n_positions": 128, "total_batch_size": 4 * 128}

    def go(folder):
        reset_accelerate()
        own = Evaluations([(3, lambda _, __, stops: {} if stops() else {"own/metric": 1.0})])
        train(tiny(folder, resume_from="latest", **settings), callbacks=[own])
        return repeatable(tmp_path / folder)

    def killed(*arguments, **named):
        if step == getattr(arguments[1], "step", 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*arguments, **named)

    honest = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        go("stopped")
    assert_status(tmp_path / "stopped", state="stopped", step=step)
    expected = go("whole")
    assert expected[0][-1].keys() >= {"val/kept", "val/loss", "own/metric"}
    assert go("stopped") == expected
    assert_status(tmp_path / "stopped", state="finished")


@long
def test_a_closed_pipe_does_not_end_a_run_and_nohup_ignores_the_hangup(tiny, tmp_path):
    settings = {"max_steps": 120, "eval_every": 20, "save_every": 60}
    config = tiny("run", **settings)
    process = subprocess.Popen(
        ["nohup", sys.executable, SCRIPT, *as_flags(config)],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert b"parameters" in process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    wait_for(lambda: last_step(tmp_path / "run") > 5)
    process.send_signal(signal.SIGHUP)
    assert process.wait(90) == 0
    assert status(tmp_path / "run")["state"] == "finished"
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 121))


@pytest.mark.parametrize(
    ("processes", "number", "code"),
    [
        (2, signal.SIGTERM, 0),
        pytest.param(1, signal.SIGINT, 0, marks=long),
        (None, signal.SIGHUP, 129),  # a closed terminal, and no launcher
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint(tiny, tmp_path, processes, number, code):
    settings = {"max_steps": 20_000, "total_batch_size": 8 * 32, "lr_schedule": "constant"}
    if processes == 2:
        settings["eval_every"] = 1  # the signal arrives during an evaluation
    config = tiny("run", **settings)
    process = start(config, processes=processes, ACCELERATE_USE_CPU="true")
    wait_for(lambda: last_step(tmp_path / "run") > 20)
    os.kill(process.pids[-1], number)
    wait_for(lambda: status(tmp_path / "run")["state"] != "running", 30)
    assert process.wait(30) == code
    name = signal.Signals(number).name
    requeue = number != signal.SIGINT
    assert_status(tmp_path / "run", state="stopped", reason=name, requeue=requeue)
    [checkpoint] = list_checkpoints(tmp_path / "run")
    assert checkpoint.name == f"checkpoint-{status(tmp_path / 'run')['step']}"


def test_a_second_ctrl_c_stops_immediately(tiny, tmp_path, before_update):
    """Not its echo, which the launcher passes on at once."""

    def endless(step):
        if step == 7:
            wait_for(lambda: list_checkpoints(tmp_path))
            for pause in (0, ECHO + 0.1, 60):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(pause)
            raise AssertionError("the second Ctrl-C did not stop the run")

    before_update(endless)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(save_every=5))
    assert_status(tmp_path, state="stopped", reason="SIGINT, twice", requeue=False)
    [checkpoint] = list_checkpoints(tmp_path)
    assert checkpoint.name == "checkpoint-5"
    assert find_corruption(checkpoint) is None


@pytest.mark.parametrize(("rank", "state"), [pytest.param(0, "running", marks=long), (1, "failed")])
def test_a_run_whose_process_was_killed_asks_for_a_requeue(tiny, tmp_path, rank, state):
    config = tiny("run", micro_batch_size=2, max_steps=10**5, lr_schedule="constant")
    process = start(config, processes=2)
    wait_for(lambda: last_step(tmp_path / "run") > 5)
    os.kill(process.pids[rank], signal.SIGKILL)
    process.wait(60)
    assert_status(tmp_path / "run", state=state, requeue=True)


def test_ranks_with_different_settings_are_refused(tiny):
    flags = as_flags(tiny("run", micro_batch_size=2))
    other = {"OTHER": "--learning_rate 0.5"}
    done = launch("tests/train_script.py", *flags, processes=2, fails=True, **other)
    assert "process 1 has the learning_rate 0.5, the main process 0.01" in done.stderr


@pytest.mark.parametrize("split", ["train", pytest.param("val", marks=long)])
def test_a_run_whose_shard_is_truncated_saves_and_names_it(split, data_dir, tmp_path):
    data = shutil.copytree(data_dir, tmp_path / "data")
    settings = {"max_steps": 10**5, "lr_schedule": "constant", "micro_batch_size": 2}
    settings |= {"eval_every": 10, "save_every": 10**6}
    config = tiny_config(data, tmp_path / "run", **settings)
    process = start(config, processes=2)
    wait_for(lambda: last_step(tmp_path / "run") > 20)
    os.truncate(data / f"{split}_000000.bin", HEADER.size + 100)
    assert process.wait(60) == 1, log_of(config)
    sentences = [line for line in log_of(config).splitlines() if line.startswith("train_script")]
    assert sentences
    assert all("its size of 164 bytes" in line for line in sentences)
    [checkpoint] = list_checkpoints(tmp_path / "run")
    assert find_corruption(checkpoint) is None
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert_status(tmp_path / "run", state="failed", step=step)


@pytest.mark.parametrize(
    ("rate", "changes"), [(1e30, {"eval_every": 2, "eval_tokens": 64}), (1e39, {})]
)
def test_a_diverged_model_is_not_saved_as_the_result(tiny, rate, changes, tmp_path):
    settings = {"max_steps": 1, "learning_rate": rate, "warmup_steps": 0} | changes
    with refused("val/loss is|holds NaN"):
        run(tiny("run", **settings))
    assert not (tmp_path / "run/model.safetensors").exists()
    assert status(tmp_path / "run")["state"] == "failed"
