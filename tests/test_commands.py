"""Runs the commands of the documentation with small models, and parses those of the recipes."""

import inspect
import os
import re
import shlex
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import load_recipe, make_text, write_lines
from launching import ROOT, forked, free_port, launched

from gpt2_accel.cli.command import run_command as run_program
from gpt2_accel.config import TrainConfig, parse_config

ASSIGNMENT = re.compile(r"\w+=")
MODEL = "--n_layer 1 --n_head 2 --n_embd 16 --max_steps 2"
LOG = "--eval_tokens 256 --sample_tokens 2"
SHORT = {
    "MODEL": MODEL,
    "LOG": LOG,
    "SMALL": f"{MODEL} {LOG} --n_positions 32 --micro_batch_size 2 --total_batch_size 128",
    "CHAT": f"--max_steps 2 --micro_batch_size 2 {LOG}",
}


def commands_of_section(name: str) -> dict[str, str]:
    """Returns the commands of a section of commands.txt, with their indented line."""
    text = (ROOT / "tests/commands.txt").read_text().replace(" \\\n ", "")
    section = text.partition(f"\n[{name}]")[2].partition("\n\n")[0]
    commands = {}
    command = ""
    for line in section.splitlines()[1:]:
        if line.startswith(" "):
            words = [SHORT.get(word, word) for word in line.split()]
            commands[command] = " ".join(words)
        else:
            command = line
            commands[command] = ""
    return commands


LOCAL = commands_of_section("local")
ON_HUB = commands_of_section("hub")
NOT_RUN = commands_of_section("not run")
# The Hub ids of OpenAI's four checkpoints.
BASELINES = [f"openai-community/gpt2{size}" for size in ("", "-medium", "-large", "-xl")]


def commands_of(text: str) -> list[str]:
    """Returns the commands in a Markdown file's `sh` blocks, without comments and `.venv/bin/`."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return commands_in(blocks.replace("\\\n", " ").splitlines())


def commands_in(lines: list[str]) -> list[str]:
    """Returns the commands in lines of a shell, with one space between words."""
    split = (shlex.split(line.replace(".venv/bin/", ""), comments=True) for line in lines)
    return [" ".join(quoted(word) for word in words) for words in split if words]


def quoted(word: str) -> str:
    """Quotes a word of a command if it needs quotes."""
    return f"'{word}'" if set(word) & set(" []>") and word != ">" else word


def run_command(
    command: str, flags: str, cwd: Path, at_import: dict[str, str] | None = None, **env: str
):
    """Runs a command with additional `flags`, not compiled, on CPUs, on at most two processes."""
    words = shlex.split(f"{command} {flags}")
    while ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    environment = os.environ | (at_import or {}) | {"ACCELERATE_USE_CPU": "true"} | env
    if words[0] == "gpt2-accel":
        words = started_by(words[1:], cwd)
    if words[0] == "python":
        return forked(words[1:], [environment], cwd, at_import)
    # words: accelerate launch, options of the launcher, the script and its flags.
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    options = words[2:script] + ["--main_process_port", free_port()]
    config = next((word for word in options if word.endswith(".yaml")), None)
    if config and yaml.safe_load((cwd / config).read_text())["num_processes"] > 2:
        options += ["--num_processes", "2"]
    argv, environments = launched(options + words[script:], environment)
    for each in environments:
        each["ACCELERATE_DYNAMO_BACKEND"] = "NO"
    return forked(argv, environments, cwd, at_import)


def started_by(words: list[str], cwd: Path) -> list[str]:
    """Returns the command that `gpt2-accel` starts in `cwd`."""
    with pytest.MonkeyPatch.context() as patch:
        started = []
        patch.setattr(os, "execv", lambda _, argv: started.extend(argv[1:]))
        words = [str(cwd / word) if word.endswith(".yaml") else word for word in words]
        patch.chdir(cwd)
        run_program(words)
    if started[:2] == ["-P", "-c"]:  # the launcher
        return ["accelerate", "launch"] + started[3:]
    return ["python"] + started


def prepare_folder(folder: Path) -> None:
    """Fills a folder like the project's root with the texts and settings of the commands."""
    for name in ("recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    texts = [make_text(800, seed) for seed in range(40)]
    for name in ("my_texts", "data"):
        (folder / name).mkdir()
    for name in ("fineweb_edu", "openwebtext"):
        (folder / "data" / name).symlink_to("more")
    for number, text in enumerate(texts):
        (folder / "my_texts" / f"{number}.txt").write_text(text)
    lines = "".join(f'{{"text": "{text.strip()}"}}\n' for text in texts)
    with pyarrow.output_stream(str(folder / "more.jsonl.zst"), compression="zstd") as file:
        file.write(lines.encode())
    write_lines(folder / "my_questions.jsonl", [{"prompt": "Why?", "answer": "So."}] * 2)
    write_lines(
        folder / "tasks.jsonl", [{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(4)]
    )
    (folder / "brief.py").write_text("def brief(row, text):\n    return len(text) / 9\n")
    (folder / "my_settings.yaml").write_text("warmup_steps: 1\n")
    (folder / "data/python_stdlib").symlink_to("mine")
    (folder / "my.yaml").symlink_to(ROOT / "accelerate_configs/8xa100.yaml")


def test_commands_txt_lists_exactly_the_documented_commands():
    written = set((ROOT / "docs/course").glob("*.md"))  # by `make docs`
    files = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - written
    documented = [command for path in files for command in commands_of(path.read_text())]
    assert set(documented) == {*LOCAL, *ON_HUB, *NOT_RUN}


def test_every_documented_command_runs(tmp_path):
    prepare_folder(tmp_path)
    for line, flags in LOCAL.items():
        run_command(line, flags, tmp_path)


def test_the_dry_run_prints_what_the_hardware_page_quotes(tmp_path):
    prepare_folder(tmp_path)
    page = (ROOT / "docs/hardware.md").read_text()
    [command] = [command for command in commands_of(page) if "--dry_run" in command]
    done = run_command(command, "", tmp_path)
    assert f"```\n{done.stdout}```" in page


def header_commands() -> list[str]:
    """Returns the commands in the headers of the recipes."""
    command = re.compile(r"    (python recipes/|accelerate launch)")
    lines = []
    for path in (ROOT / "recipes").rglob("*.py"):
        header = path.read_text().split('"""')[1]
        lines += re.sub(r"\\+\n", " ", header).splitlines()
    return commands_in([line for line in lines if command.match(line)])


@pytest.mark.parametrize("command", sorted(set(header_commands()) - {*LOCAL, *ON_HUB, *NOT_RUN}))
def test_every_command_of_a_recipes_header_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setitem(sys.modules, "gradio", None)  # takes seconds to import
    words = shlex.split(command)
    if words[0] == "accelerate":
        parsed = launch_command_parser().parse_args(words[2:])
        script, args = parsed.training_script, parsed.training_script_args
    else:
        script, args = words[1], words[2:]
    recipe = load_recipe(Path(script).relative_to("recipes").with_suffix("").as_posix())
    if hasattr(recipe, "parse_options"):
        monkeypatch.setattr(sys, "argv", [script, *args])
        assert recipe.parse_options()
        return
    settings = TrainConfig
    for _, member in inspect.getmembers(recipe, is_dataclass):
        if inspect.isclass(member) and member.__module__ == recipe.__name__:
            settings = member
            break
    assert parse_config(settings, args)
