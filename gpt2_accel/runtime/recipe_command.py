"""The shipped folders, in a clone and in an installed wheel, and the command that runs a recipe.

A wheel holds the folders `recipes`, `accelerate_configs` and `benchmarks` inside the package; in a
clone they are beside it.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# The recipes that run in one process, by their command of `gpt2-accel`; the others are launched.
IN_PROCESS = """
    prepare-data sample evaluate report demo push-to-hub import-checkpoint compare scaling-laws
    python-conversations
""".split()  # noqa: SIM905


def folder(name: str) -> Path:
    """Returns the path of a shipped folder, such as `recipes`."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def recipe_command(recipe: str, *arguments: str | Path) -> str:
    """Returns the shell command that runs a recipe of `IN_PROCESS` from the working directory.

    The console command has its name if PATH finds it, else its path.
    """
    console = Path(sys.executable).with_name("gpt2-accel")
    found = shutil.which(console.name) == str(console)
    program = console.name if found else os.path.relpath(console)
    return shlex.join([program, recipe, *map(str, arguments)])
