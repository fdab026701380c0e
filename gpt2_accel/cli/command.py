"""The console command `gpt2-accel`: runs recipes, launches training, prints shipped settings.

The process is replaced by the recipe's, or by that of Accelerate's launcher: signals and exit codes are theirs.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from gpt2_accel import cli
from gpt2_accel.cli.shipped import find, launch_configs, recipes, settings, unknown
from gpt2_accel.recipe_command import COMMANDS, folder

HELP = """usage: gpt2-accel COMMAND [--help | arguments]

{commands}
  doctor                  check this machine: what works for training, and the fixes
  launch CONFIG RECIPE    start a recipe by `accelerate launch`, as in
                          gpt2-accel launch 8xa100 pretrain-124m --max_steps 1000
  config NAME             print a launch config or other settings, as in
                          gpt2-accel config 8xa100 > my.yaml

CONFIG is a file or one of
  {configs}
RECIPE is a .py file or one of
  {recipes}
Flags of Accelerate's launcher may stand between the two. `config` also prints
  {settings}
"""


def main() -> None:
    """Runs the command line of `gpt2-accel`."""
    cli.run(lambda: run(sys.argv[1:]))


def run(words: list[str]) -> None:
    """Runs a command with its arguments. Raises `ValueError` if a name is unknown or missing."""
    command, *args = words or ["--help"]
    help_asked = {"-h", "--help"} & {command, *args[:1]}
    if help_asked and command in ("-h", "--help", "launch", "config"):
        print(help_text(), end="")
    elif command in COMMANDS:
        start(folder("recipes") / f"{COMMANDS[command]}.py", *args)
    elif command == "quickstart":
        launch("cpu", "quickstart", *args)
    elif command == "doctor":
        start("-P", "-m", "gpt2_accel.cli.doctor", *args)
    elif command == "launch":
        launch(*args)
    elif command == "config":
        print_config(*args)
    elif is_recipe(command):
        raise ValueError(
            f"{command} is a recipe: start it by gpt2-accel launch CONFIG {command}, where CONFIG is one of "
            f"{', '.join(launch_configs())}"
        )
    else:
        raise ValueError(
            unknown("command", command, ["quickstart", *COMMANDS, "doctor", "launch", "config"])
        )


def help_text() -> str:
    """Returns the text of `gpt2-accel --help`."""
    commands = {"quickstart": "quickstart", **COMMANDS}
    lines = (f"  {name:24}{summary(recipe)}" for name, recipe in commands.items())
    return HELP.format(
        commands="\n".join(lines),
        configs=" ".join(launch_configs()),
        recipes=" ".join(recipes()),
        settings=" ".join(settings()),
    )


def summary(recipe: str) -> str:
    """Returns the first line of a recipe's docstring, without the full stop."""
    text = (folder("recipes") / f"{recipe}.py").read_text(encoding="utf-8")
    return text.split('"""')[1].partition("\n")[0].removesuffix(".")


def launch(*args: str) -> None:
    """Starts `accelerate launch`. `args`: launch config, flags of the launcher, recipe, settings of the recipe."""
    if len(args) < 2:
        raise ValueError(
            "launch needs a launch config and a recipe: gpt2-accel launch cpu quickstart"
        )
    config = file_or_shipped("launch config", args[0], launch_configs())
    check_launch_config(config)
    at = 1
    if args[1].startswith("-"):
        found = (i for i, word in enumerate(args) if i and is_recipe(word))
        at = next(found, len(args) - 1)
    if args[at].endswith((".yaml", ".yml")):
        raise ValueError(
            f"{args[at]} is no recipe: name one before its settings, as in gpt2-accel launch cpu quickstart --config "
            f"{args[at]}"
        )
    recipe = file_or_shipped("recipe", args[at], recipes())
    # -P: a file in the working directory must not be imported in place of a library.
    launcher = ("-P", "-m", "accelerate.commands.launch", "--config_file", config)
    start(*launcher, *args[1:at], recipe, *args[at + 1 :])


def is_recipe(word: str) -> bool:
    """Whether a word of a command line names a recipe, or a file of Python."""
    return word.endswith(".py") or word.replace("_", "-") in recipes()


def file_or_shipped(what: str, name: str, shipped: dict[str, Path]) -> Path:
    """Returns the user's file of this name, which has a suffix or a folder, or else the shipped one."""
    path = Path(name)
    named_as_file = path.suffix or os.sep in name
    return path if named_as_file and path.is_file() else find(what, name, shipped)


def check_launch_config(path: Path) -> None:
    """Raises `ValueError` if a file cannot be a config of Accelerate's launcher, which would print a traceback."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} is no launch config: give a YAML file that accelerate config wrote"
        )


def print_config(*args: str) -> None:
    """Prints a launch config, or the settings or the notebook of a recipe."""
    if len(args) != 1:
        raise ValueError("config needs one name: gpt2-accel config cpu")
    path = find("config", args[0], launch_configs() | settings())
    print(path.read_text(encoding="utf-8"), end="")


def start(*arguments: str | Path) -> NoReturn:
    """Replaces this process by Python with `arguments`."""
    os.execv(sys.executable, [sys.executable, *map(str, arguments)])
