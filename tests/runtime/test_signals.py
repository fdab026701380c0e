"""Signals to the launcher, as Slurm sends them, and to children of a dying process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import as_flags, assert_status, long, metrics
from launching import ROOT, free_port, wait_for

from gpt2_accel.checkpoint.find import find_corruption, list_checkpoints

SBATCH = (ROOT / "recipes/cluster/pretrain.sbatch").read_text()
# The variables for the launcher in the Slurm script.
EXPORTED = dict(re.findall(r"^export (PET_\w+)=(\S+)$", SBATCH, re.MULTILINE))


ACCELERATE, SCRIPT = "accelerate.commands.launch", "tests/train_script.py"


def started(launcher, *arguments, **variables):
    """Starts a launcher, a module of Python, on CPUs."""
    return subprocess.Popen(
        [sys.executable, "-m", launcher, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def send_to_all(launcher, number):
    """Sends a signal as Slurm does: to the launcher, which forwards it, and to its descendants."""
    launcher = psutil.Process(launcher)
    for process in launcher.children(recursive=True) + [launcher]:
        process.send_signal(number)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        # Which torchrun does not forward by default.
        pytest.param(signal.SIGUSR1, os.kill, marks=long),
        pytest.param(signal.SIGTERM, os.kill, marks=long),
        pytest.param(signal.SIGINT, os.kill, marks=long),
        pytest.param(signal.SIGINT, send_to_all, marks=long),
    ],
)
def test_a_signal_to_the_launcher_leaves_a_checkpoint(tiny, number, send, tmp_path):
    settings = {"micro_batch_size": 2, "max_steps": 10**5, "lr_schedule": "constant"}
    if send is send_to_all:
        settings["total_batch_size"] = 400 * 32  # updates long enough for both signals
    config = tiny("run", **settings)
    flags = ("--multi_gpu", "--num_processes", 2, "--main_process_port", free_port())
    launcher = started(ACCELERATE, *flags, SCRIPT, *as_flags(config), **EXPORTED)
    try:
        wait_for(lambda: len(metrics(tmp_path / "run")) >= 5)
        send(launcher.pid, number)
        launcher.wait(60)
    finally:
        launcher.kill()
    [checkpoint] = list_checkpoints(tmp_path / "run")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    requeue = number != signal.SIGINT
    assert_status(tmp_path / "run", state="stopped", reason=number.name, requeue=requeue, step=step)
    assert find_corruption(checkpoint) is None


def test_the_slurm_script_forwards_its_signal_and_needs_no_folder():
    assert "SIGUSR1" in EXPORTED["PET_SIGNALS_TO_HANDLE"].split(",")
    warning = int(re.search(r"--signal=USR1@(\d+)", SBATCH)[1])
    assert 30 <= int(EXPORTED["PET_SHUTDOWN_TIMEOUT"]) < warning
    assert "/" not in re.search(r"--output=(\S+)", SBATCH)[1]  # a fresh clone has no runs/


@long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has this signal")
def test_a_trainer_ends_with_its_launcher_while_it_imports(tiny):
    config = tiny("run", max_steps=10**5)
    for library in ("libtorch_cpu", "tokenizers"):  # what the trainer imports first and late
        launcher = started(ACCELERATE, SCRIPT, *as_flags(config))
        process = psutil.Process(launcher.pid)
        trainers = []
        while not trainers:
            assert launcher.poll() is None
            time.sleep(0.02)
            trainers = [child for child in process.children() if "-m" not in child.cmdline()]
        maps = Path(f"/proc/{trainers[0].pid}/maps")
        while library not in maps.read_text():
            time.sleep(0.02)
        launcher.kill()
        _, alive = psutil.wait_procs(trainers, timeout=5)
        for trainer in alive:
            trainer.kill()
        assert not alive, library
