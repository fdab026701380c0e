"""The console command `gpt2-accel` and the shipped files: what it starts, prints and refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import refused
from launching import ROOT
from tables import table

from gpt2_accel.cli import command
from gpt2_accel.runtime import device

CASES = table("cli/cases")
CONFIGS, RECIPES = ROOT / "accelerate_configs", ROOT / "recipes"
QUICKSTART = [str(RECIPES / "quickstart.py")]
LAUNCHER = ["-P", "-c", command.LAUNCHER, "--config_file"]


@pytest.fixture
def started(monkeypatch):
    """A function that runs `gpt2-accel` and returns the arguments of the Python that it starts."""

    def start(*words):
        calls = []
        monkeypatch.setattr(os, "execv", lambda program, argv: calls.append((program, argv)))
        command.run_command(list(words))
        [(program, argv)] = calls
        assert program == argv[0] == sys.executable
        return argv[1:]

    return start


def test_launch_starts_accelerates_launcher(started, tmp_path, monkeypatch):
    train = [str(RECIPES / "pretrain_124m.py"), "--max_steps", "2"]
    config = [*LAUNCHER, str(CONFIGS / "8xa100_fsdp2.yaml")]
    for name, recipe in (("8xa100-fsdp2", "pretrain-124m"), ("8xa100_fsdp2", "pretrain_124m.py")):
        assert started("launch", name, recipe, "--max_steps", "2") == config + train
    flags = ["--num_processes", "2", "--mixed_precision", "no"]
    arguments = started("launch", "8xa100-fsdp2", *flags, "pretrain-124m", "--max_steps", "2")
    assert arguments == config + flags + train
    assert started("launch", "cpu", "quickstart", "--help") == QUICKSTART + ["--help"]
    monkeypatch.chdir(tmp_path)
    for file in ("cpu.yaml", "mine.py"):
        Path(file).write_text("num_processes: 1\n")
    assert started("launch", "cpu.yaml", "mine.py") == [*LAUNCHER, "cpu.yaml", "mine.py"]


def test_a_recipe_without_a_launch_config_takes_the_one_that_fits(started, monkeypatch):
    monkeypatch.setattr(command, "may_have_gpu", lambda: False)
    expected = [*LAUNCHER, str(CONFIGS / "cpu.yaml"), *QUICKSTART, "--seed", "2"]
    for words in (["quickstart"], ["launch", "quickstart"]):
        assert started(*words, "--seed", "2") == expected
    monkeypatch.setattr(command, "may_have_gpu", lambda: True)
    monkeypatch.setattr(device, "launch_device", lambda: torch.device("cuda"))
    monkeypatch.setenv(device.OVERRIDES, '{"accelerator_count": 3, "has_bf16": true}')
    config = [*LAUNCHER, str(CONFIGS / "8xa100.yaml"), "--num_processes", "3"]
    assert started("quickstart") == config + QUICKSTART


@pytest.mark.parametrize(("kind", "gpus", "bf16", "expected"), CASES["launch configs"])
def test_the_launch_config_fits_the_machine(kind, gpus, bf16, expected, monkeypatch):
    monkeypatch.setattr(command, "may_have_gpu", lambda: True)
    monkeypatch.setattr(device, "launch_device", lambda: torch.device(kind))
    answers = {"accelerator_count": gpus, "has_bf16": bf16}
    monkeypatch.setenv(device.OVERRIDES, json.dumps(answers))
    assert " ".join(command.fitting_launch()) == expected
    assert expected.split()[0] in command.CONFIGS


@pytest.mark.parametrize(("words", "message"), CASES["wrong names"])
def test_a_wrong_name_is_answered_with_close_ones_or_all(words, message, started):
    with refused(message):
        started(*words.split())


@pytest.mark.parametrize(("name", "file"), CASES["shipped files"])
def test_config_prints_a_shipped_file(name, file, capsys):
    command.run_command(["config", name])
    assert capsys.readouterr().out == (ROOT / file).read_text()


def test_help_names_everything_and_imports_no_library():
    code = (
        "import sys; sys.argv = ['gpt2-accel']; from gpt2_accel.cli.command import main; main()\n"
        "print({'torch', 'transformers', 'accelerate', 'numpy', 'yaml'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("set()\n")
    assert not done.stderr
    for names in (command.RECIPES, command.CONFIGS, command.SETTINGS):
        assert [name for name in names if name not in done.stdout] == []
