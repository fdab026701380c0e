"""Processes agree on one checkpoint and one run id, and all end if one fails."""

import os
import time

import pytest
from conftest import as_flags, assert_status, metrics, refused, reset_accelerate, tiny_config
from launching import launch

from gpt2_accel.runtime.files import lock_folder
from gpt2_accel.runtime.processes import process_state


def test_resume_refuses_a_checkpoint_that_only_the_main_process_sees(data_dir, tmp_path):
    """Otherwise rank 0 would resume from update 8 and rank 1 start from 0."""
    changes = {"micro_batch_size": 2, "max_steps": 8, "save_every": 4, "resume_from": "latest"}
    config = tiny_config(data_dir, "run", **changes)
    script = "tests/train_script.py"
    disks = {"DISKS": str(tmp_path)}
    launch(script, *as_flags(config), processes=2, **disks)
    changes["max_steps"] = 12
    config = tiny_config(data_dir, "run", **changes)
    done = launch(script, *as_flags(config), processes=2, fails=True, **disks)
    assert "process 1 has the checkpoint None" in done.stderr
    assert "all nodes share" in done.stderr
    assert_status(tmp_path / "node0/run", state="finished", step=8)


BUG = """
import os
from gpt2_accel.checkpoint.writer import CheckpointWriter
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import train

def rotate(writer, step):
    raise AttributeError("planted")

def save(writer, *state):
    honest(writer, *state)
    writer._wait()

honest, CheckpointWriter.save, CheckpointWriter.rotate = CheckpointWriter.save, save, rotate
try:
    train(parse_config(TrainConfig))
except Exception as error:
    with open(os.environ["RANK"] + ".txt", "w") as file:
        file.write(f"{type(error).__name__}: {error}")
    raise
"""


def test_a_bug_in_saving_ends_all_processes_at_the_next_update(data_dir, tmp_path):
    (tmp_path / "bug.py").write_text(f"import os; os.chdir({str(tmp_path)!r})\n{BUG}")
    config = tiny_config(data_dir, "run", micro_batch_size=2, save_every=2)
    done = launch(tmp_path / "bug.py", *as_flags(config), processes=2, fails=True)
    assert 'raise AttributeError("planted")' in done.stderr
    assert (tmp_path / "0.txt").read_text() == "AttributeError: planted"
    error = (tmp_path / "1.txt").read_text()
    assert error.startswith("RuntimeError: Traceback")
    assert "AttributeError: planted" in error
    assert_status(tmp_path / "run", state="failed", step=2, requeue=False)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_if_one_process_fails_before_training_all_end_with_its_error(data_dir, tmp_path):
    config = tiny_config(data_dir, tmp_path / "run", micro_batch_size=2)
    started = time.monotonic()
    with lock_folder(tmp_path / "run"):
        done = launch("tests/train_script.py", *as_flags(config), processes=2, fails=True)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("train_script.py:")]
    assert sentences, done.stderr
    assert all("in use by" in line for line in sentences), done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("name", ["LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_variable_of_a_launch_that_is_left_in_the_environment_is_named(name, monkeypatch):
    variables = {"ACCELERATE_USE_CPU": "true", name: "2"}
    monkeypatch.setattr(os, "environ", variables)  # Accelerate adds others
    reset_accelerate()
    with refused(f"but {name} in the environment"):
        process_state()
