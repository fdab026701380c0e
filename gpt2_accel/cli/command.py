"""The console command `gpt2-accel`: runs recipes, launches training, prints shipped settings.

It finds recipes, launch configs and settings by name, and the launch config that fits this machine.
The process is replaced by the recipe's process or Accelerate's launcher, which receives its signals
and sets its exit code.
"""

import os
import platform
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import gpt2_accel
from gpt2_accel import cli
from gpt2_accel.runtime.cores import may_have_gpu, missing_gpu, usable_cpus
from gpt2_accel.runtime.recipe_command import COMMANDS, folder

HELP = """usage: gpt2-accel COMMAND [--help | settings], or gpt2-accel --version

{commands}
  launch CONFIG RECIPE    train with another launch config than the one that fits, as in
                          gpt2-accel launch 8xa100 pretrain-124m --max_steps 1000
                          or print its memory, FLOPs and time, as in
                          gpt2-accel pretrain-124m --dry_run 8xa100 A100
  doctor                  print versions, devices and the launch config that fits, for a report
  config NAME             print a launch config or other settings, as in
                          gpt2-accel config 8xa100 > my.yaml

CONFIG is a file or one of
  {configs}
Flags of Accelerate's launcher may stand between CONFIG and RECIPE, which may be a .py file.
`config` also prints
  {settings}
"""


def by_name(where: str, *suffixes: str) -> dict[str, Path]:
    """Returns the files of a shipped folder by their `command_name`."""
    paths = sorted(folder(where).iterdir())
    return {command_name(path): path for path in paths if path.suffix in suffixes}


def command_name(path: Path) -> str:
    """Returns the name of a file with hyphens for underscores and without suffix."""
    return path.stem.replace("_", "-")


CONFIGS = by_name("accelerate_configs", ".yaml")
RECIPES = by_name("recipes", ".py")
SETTINGS = by_name("recipes", ".yaml", ".ipynb")
TRAINED = [name for name, path in RECIPES.items() if path.stem not in COMMANDS.values()]


def main() -> None:
    """Runs the command line of `gpt2-accel`."""
    cli.run(lambda: run_command(sys.argv[1:]))


def run_command(words: list[str]) -> None:
    """Runs a command with its arguments. Raises `ValueError` if a name is unknown or missing."""
    if not words:
        words = ["--help"]
    command, *args = words
    if command in ("-h", "--help"):
        print(help_text(), end="")
    elif command == "--version":
        print(f"gpt2_accel {gpt2_accel.__version__}")
    elif command in COMMANDS:
        start(folder("recipes") / f"{COMMANDS[command]}.py", *args)
    elif command == "launch":
        launch(*args)
    elif command == "config":
        print_config(*args)
    elif command == "doctor":
        doctor()
    elif is_recipe(command, TRAINED):
        launch(command, *args)
    else:
        names = TRAINED + list(COMMANDS) + ["launch", "config", "doctor"]
        raise ValueError(unknown("command", command, names))


def help_text() -> str:
    """Returns the text of `gpt2-accel --help`."""
    stems = {name: RECIPES[name].stem for name in TRAINED} | COMMANDS
    commands = []
    for name, stem in stems.items():
        text = (folder("recipes") / f"{stem}.py").read_text(encoding="utf-8")
        summary = text.removeprefix('"""').partition("\n")[0].removesuffix(".")
        commands.append(f"  {name:24}{summary}")
    return HELP.format(
        commands="\n".join(commands), configs=" ".join(CONFIGS), settings=" ".join(SETTINGS)
    )


def launch(*args: str) -> None:
    """Starts `accelerate launch`.

    `args` are a launch config, flags of the launcher, a recipe and its settings. A recipe without a
    launch config takes the one that fits this machine; a line on stderr names it.
    """
    recipes = [i for i, word in enumerate(args) if is_recipe(word, RECIPES)]
    if not recipes:
        raise ValueError(unknown("recipe in", " ".join(args), RECIPES))
    at = recipes[0]
    recipe = find("recipe", args[at], RECIPES)
    options = args[at + 1 :]
    if "-h" in options or "--help" in options:  # needs no launcher, which takes seconds
        start(recipe, "--help")
        return
    chosen = list(args[:at])
    if not chosen or chosen[0].startswith("-"):
        chosen = fitting_launch() + chosen
        line = f"gpt2-accel launch {shlex.join(chosen)} {shlex.quote(args[at])}"
        print(f"{line}: the launch config that fits this machine", file=sys.stderr, flush=True)
    config, *flags = chosen
    path = find("launch config", config, CONFIGS)
    # -P: a file in the working directory must not be imported in place of a library.
    launcher = ("-P", "-m", "accelerate.commands.launch", "--config_file", path)
    start(*launcher, *flags, recipe, *options)


def is_recipe(word: str, names: Collection[str]) -> bool:
    """Whether a word of a command line names one of the recipes, or a file of Python."""
    return word.endswith(".py") or word.replace("_", "-") in names


def print_config(*args: str) -> None:
    """Prints a launch config, or the settings or the notebook of a recipe."""
    if len(args) != 1:
        raise ValueError("config needs one name: gpt2-accel config cpu")
    path = find("config", args[0], CONFIGS | SETTINGS)
    print(path.read_text(encoding="utf-8"), end="")


def start(*arguments: str | Path) -> None:
    """Replaces this process by Python with `arguments`."""
    command = [sys.executable]
    command += map(str, arguments)
    os.execv(sys.executable, command)


def find(kind: str, name: str, shipped: dict[str, Path]) -> Path:
    """Returns the user's file of this name, or else the shipped one.

    Raises `ValueError` if there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.parent.name or command_name(path) not in shipped:
        raise ValueError(unknown(kind, name, shipped))
    return shipped[command_name(path)]


def unknown(kind: str, given: str, names: Iterable[str]) -> str:
    """Returns the message about words that name nothing, with the known names."""
    return f"there is no {kind} {given!r}: choose one of {', '.join(names)}"


def fitting_launch() -> list[str]:
    """Returns the launch config that fits this machine, and the launcher's flags that it needs."""
    if not may_have_gpu():
        return ["cpu"]
    from gpt2_accel.runtime.device import accelerator_count, has_bf16, launch_device

    device = launch_device()
    return launch_for(device.type, accelerator_count(), has_bf16(device))


def launch_for(kind: str, gpus: int, bf16: bool) -> list[str]:
    """Returns the launch config and flags for `gpus` devices of a type such as `cuda`.

    A CPU with bf16 units also gets `cpu`: compiled bf16, which is faster, takes a minute to start.
    """
    if kind in ("cpu", "mps"):
        return [kind]
    if gpus == 1:
        return ["1xgpu"] if bf16 else ["1xt4-fp16"]
    name = "8xa100" if bf16 else "2xt4-fp16"
    return [name, "--num_processes", str(gpus)]


def doctor() -> None:
    """Prints versions, machine, whether runs are compiled, and the launch config that fits."""
    from gpt2_accel.hf.model_card import installed_versions
    from gpt2_accel.runtime.device import (
        accelerator_count,
        device_name,
        has_bf16,
        inductor_problem,
        launch_device,
        total_memory,
    )

    device = launch_device()
    bf16 = "with" if has_bf16(device) else "without"
    print(", ".join(f"{name} {version}" for name, version in installed_versions().items()))
    print(f"{platform.platform()}, {usable_cpus()} CPU cores")
    memory = total_memory(device) / 1e9
    devices = f"{accelerator_count() or 1} x {device_name(device)}"
    print(f"{devices}, {memory:.0f} GB, {bf16} bf16 units")
    if device.type == "cpu" and may_have_gpu():
        print(missing_gpu())
    print(f"compiled: {inductor_problem(device) or 'yes'}")
    print(f"launch config: {shlex.join(fitting_launch())}")
