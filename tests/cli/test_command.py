"""The console command `gpt2-accel` and the shipped files: what it starts, prints and refuses."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import refused, run_recipe
from launching import ROOT

from gpt2_accel.cli import command
from gpt2_accel.runtime import cores, device, recipe_command

CONFIGS, RECIPES = ROOT / "accelerate_configs", ROOT / "recipes"
QUICKSTART = [str(RECIPES / "quickstart.py")]
LAUNCHER = ["-P", "-m", "accelerate.commands.launch", "--config_file"]


@pytest.fixture
def started(monkeypatch):
    """A function that runs `gpt2-accel` and returns the arguments of the Python that it starts."""

    def start(*words):
        calls = []
        monkeypatch.setattr(os, "execv", lambda program, argv: calls.append((program, argv)))
        command.run(list(words))
        [(program, argv)] = calls
        assert program == argv[0] == sys.executable
        return argv[1:]

    return start


def test_every_recipe_is_a_command_or_launched(started):
    for name, recipe in recipe_command.COMMANDS.items():
        assert started(name, "--x", "1") == [str(RECIPES / f"{recipe}.py"), "--x", "1"]
    launched = {path.stem for path in RECIPES.glob("*.py")} - {*recipe_command.COMMANDS.values()}
    assert launched == {name.replace("-", "_") for name in command.TRAINED}
    assert {"quickstart", "pretrain_124m"} <= launched
    for recipe in launched:
        assert "accelerate launch" in (RECIPES / f"{recipe}.py").read_text().split('"""')[1]


def test_doctor_names_versions_device_and_launch_config(monkeypatch, capsys):
    answers = {"total_memory": 80e9, "has_bf16": True, "has_cpp_compiler": False}
    monkeypatch.setenv(device.OVERRIDES, json.dumps(answers))
    monkeypatch.setattr(device, "launch_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(command, "may_have_gpu", lambda: True)
    command.run(["doctor"])
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said and f"{cores.usable_cpus()} CPU cores" in said
    assert "1 x cpu, 80 GB, with bf16 units" in said and cores.missing_gpu() in said
    assert "no C++ compiler" in said and said.endswith("launch config: cpu\n")


def test_launch_starts_accelerates_launcher(started, tmp_path, monkeypatch):
    train = [str(RECIPES / "pretrain_124m.py"), "--max_steps", "2"]
    expected = [*LAUNCHER, str(CONFIGS / "8xa100_fsdp2.yaml"), *train]
    for config, recipe in (
        ("8xa100-fsdp2", "pretrain-124m"),
        ("8xa100_fsdp2", "pretrain_124m"),
        ("8xa100_fsdp2.yaml", "pretrain_124m.py"),
    ):
        assert started("launch", config, recipe, "--max_steps", "2") == expected
    flags = ["--num_processes", "2", "--mixed_precision", "no"]
    found = started("launch", "8xa100-fsdp2", *flags, "pretrain-124m", "--max_steps", "2")
    assert found == [*expected[:5], *flags, *train]
    assert started("launch", "cpu", "quickstart", "--help") == [*QUICKSTART, "--help"]
    monkeypatch.chdir(tmp_path)
    for file in ("cpu.yaml", "mine.py"):
        Path(file).write_text("num_processes: 1\n")
    assert started("launch", "cpu.yaml", "mine.py") == [*LAUNCHER, "cpu.yaml", "mine.py"]
    assert started("launch", "cpu", "mine.py") == [*LAUNCHER, str(CONFIGS / "cpu.yaml"), "mine.py"]


def test_a_recipe_without_a_launch_config_takes_the_one_that_fits(started, monkeypatch, capsys):
    monkeypatch.setattr(command, "may_have_gpu", lambda: False)
    expected = [*LAUNCHER, str(CONFIGS / "cpu.yaml"), *QUICKSTART, "--seed", "2"]
    for words in (["quickstart"], ["launch", "quickstart"]):
        assert started(*words, "--seed", "2") == expected
    assert capsys.readouterr().err.startswith("gpt2-accel launch cpu quickstart: the launch config")
    monkeypatch.setattr(command, "may_have_gpu", lambda: True)
    monkeypatch.setattr(device, "launch_device", lambda: torch.device("cuda"))
    monkeypatch.setenv(device.OVERRIDES, '{"accelerator_count": 3, "has_bf16": true}')
    flags = [str(CONFIGS / "8xa100.yaml"), "--num_processes", "3"]
    assert started("quickstart") == [*LAUNCHER, *flags, *QUICKSTART]
    given = ["launch", "--num_processes", "2", "quickstart"]  # wins, as the last one
    assert started(*given) == [*LAUNCHER, *flags, *given[1:3], *QUICKSTART]


@pytest.mark.parametrize(
    "kind, gpus, bf16, expected",
    [
        ("cpu", 0, True, "cpu"),
        ("mps", 1, True, "mps"),
        ("cuda", 1, True, "1xgpu"),
        ("cuda", 1, False, "1xt4-fp16"),
        ("cuda", 4, False, "2xt4-fp16 --num_processes 4"),
        ("cuda", 4, True, "8xa100 --num_processes 4"),
    ],
)
def test_the_launch_config_fits_the_machine(kind, gpus, bf16, expected):
    assert " ".join(command.fitting(kind, gpus, bf16)) == expected
    assert expected.split()[0] in command.CONFIGS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sampel --model x", "no command 'sampel': did you mean sample"),
        (
            "launch cpu pretrian_124m",
            "no recipe in 'cpu pretrian_124m': did you mean pretrain-124m",
        ),
        ("launch missing/cpu.yaml quickstart", "no launch config 'missing/cpu.yaml': choose"),
        ("launch 8xa10 quickstart", "no launch config '8xa10': did you mean 8xa100"),
        ("config nanogpt_openwebtxt", "no config .*: did you mean nanogpt-openwebtext"),
    ],
)
def test_a_wrong_name_is_answered_with_the_names_that_exist(words, message, started):
    with refused(message):
        started(*words.split())


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("8xa100", CONFIGS / "8xa100.yaml"),
        ("nanogpt-openwebtext", RECIPES / "nanogpt_openwebtext.yaml"),
        ("notebook", RECIPES / "notebook.ipynb"),
    ],
)
def test_config_prints_a_shipped_file(name, file, capsys):
    command.run(["config", name])
    assert capsys.readouterr().out == file.read_text()


def test_the_version_is_that_of_the_package(capsys):
    command.run(["--version"])
    assert capsys.readouterr().out == f"gpt2_accel {metadata.version('gpt2_accel')}\n"


def test_the_table_of_commands_in_the_documentation_is_complete():
    text = (ROOT / "docs/install.md").read_text()
    table = text.partition("| in this documentation |")[2].partition("\n\n")[0]
    assert [name for name in recipe_command.COMMANDS if name not in table] == []


def test_help_names_everything_and_imports_no_library():
    code = (
        "import sys; sys.argv = ['gpt2-accel']; from gpt2_accel.cli.command import main; main()\n"
        "print({'torch', 'transformers', 'accelerate', 'numpy', 'yaml'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("set()\n") and not done.stderr
    names = [
        *recipe_command.COMMANDS,
        *command.TRAINED,
        *command.CONFIGS,
        *command.SETTINGS,
    ]
    assert [name for name in names if name not in done.stdout] == []


def test_commands_for_the_user_are_those_of_the_installation(monkeypatch, tmp_path):
    program = tmp_path / "gpt2-accel"
    program.touch(0o755)
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = recipe_command.recipe_command("push_to_hub", "--model", "a b")
    assert found == f"{tmp_path.name}/gpt2-accel push --model 'a b'"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recipe_command.recipe_command("sample") == "gpt2-accel sample"


def test_printed_commands_are_quoted(monkeypatch, tmp_path):
    odd, quoted = "it's $(touch x)", """it'"'"'s $(touch x)"""
    monkeypatch.chdir(tmp_path)
    data = ("--data_dir", odd)
    for recipe, flags, option in (
        ("quickstart", data, "--data_dir"),
        ("chat_sft", data, "--data_dir"),
    ):
        with refused(re.escape(f"{option} '{quoted}'")):
            run_recipe(recipe, *flags)
    monkeypatch.setattr(sys, "executable", str(tmp_path / odd / "python"))
    assert recipe_command.recipe_command("sample").startswith(f"'{quoted}/gpt2-accel' ")
