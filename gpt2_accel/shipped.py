"""Finds the shipped recipes and launch configs, in a clone and in an installed wheel, and names their commands.

A wheel holds the folders `recipes`, `accelerate_configs` and `benchmarks` inside the package; in a clone they are beside
it.
"""

import difflib
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
FOLDERS = ("recipes", "accelerate_configs", "benchmarks")
# Sub-command of `gpt2-accel` -> the recipe that it runs in one process.
COMMANDS = {
    "prepare-data": "prepare_data",
    "sample": "sample",
    "evaluate": "evaluate",
    "report": "report",
    "demo": "demo",
    "export": "export",
    "average-checkpoints": "average_checkpoints",
    "push": "push_to_hub",
    "import": "import_checkpoint",
    "speed-ladder": "speed_ladder",
}


def folder(name: str) -> Path:
    """Returns the path of one of `FOLDERS`."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def launch_configs() -> dict[str, Path]:
    """Returns the shipped launch configs: name -> file."""
    return by_name("accelerate_configs", "*.yaml")


def recipes() -> dict[str, Path]:
    """Returns the shipped recipes: name -> file."""
    return by_name("recipes", "*.py")


def settings() -> dict[str, Path]:
    """Returns the shipped settings and notebooks of recipes: name -> file."""
    return by_name("recipes", "*.yaml") | by_name("recipes", "*.ipynb")


def by_name(where: str, pattern: str) -> dict[str, Path]:
    """Returns the files of a shipped folder by their names, written with hyphens and without suffix."""
    files = sorted(folder(where).glob(pattern))
    return {path.stem.replace("_", "-"): path for path in files}


def find(what: str, name: str, shipped: dict[str, Path]) -> Path:
    """Returns the shipped file with this name, which may be written with underscores and a suffix.

    Raises `ValueError` if there is none.
    """
    plain = re.sub(r"\.\w+$", "", name).replace("_", "-")
    if plain not in shipped:
        raise ValueError(unknown(what, name, shipped))
    return shipped[plain]


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    """Returns the message about an unknown name. It lists all names, those like it first."""
    close = difflib.get_close_matches(name, names := list(names))
    listed = ", ".join([*close, *(other for other in names if other not in close)])
    return f"there is no {what} {name!r}: choose one of {listed}"


def recipe_command(recipe: str) -> str:
    """Returns the command that runs `recipes/RECIPE.py`, as a shell in the working directory takes it.

    It is `gpt2-accel NAME` for an installed wheel, else `python recipes/RECIPE.py`.
    """
    python = Path(sys.executable)
    if folder("recipes").parent != PACKAGE:
        return f"{typed(python)} {os.path.relpath(folder('recipes') / f'{recipe}.py')}"
    [name] = [name for name, script in COMMANDS.items() if script == recipe]
    return f"{typed(python.with_name('gpt2-accel'))} {name}"


def typed(program: Path) -> str:
    """Returns how to call a program: by name if PATH finds it or nothing is there, else by the shorter of its paths."""
    if shutil.which(program.name) == str(program) or not program.exists():
        return program.name
    return min(os.path.relpath(program), str(program), key=len)


def with_commands(text: str) -> str:
    """Replaces `python recipes/RECIPE.py` in a help text by `recipe_command`."""
    pattern = rf"\bpython recipes/({'|'.join(COMMANDS.values())})\.py"
    return re.sub(pattern, lambda match: recipe_command(match[1]), text)
