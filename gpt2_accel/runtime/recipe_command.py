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
# Sub-command of `gpt2-accel` -> the recipe that it runs in one process.
COMMANDS = {
    "prepare-data": "prepare_data",
    "sample": "sample",
    "evaluate": "evaluate",
    "report": "report",
    "demo": "demo",
    "export": "export",
    "push": "push_to_hub",
    "import": "import_checkpoint",
    "speed-ladder": "speed_ladder",
    "compare": "compare",
    "scaling-laws": "scaling_laws",
    "python-conversations": "python_conversations",
}


def folder(name: str) -> Path:
    """Returns the path of a shipped folder, such as `recipes`."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def recipe_command(recipe: str, *arguments: str | Path) -> str:
    """Returns the shell command that runs `recipes/RECIPE.py` from the working directory."""
    [name] = [name for name, script in COMMANDS.items() if script == recipe]
    console = Path(sys.executable).with_name("gpt2-accel")
    return shlex.join([program(console), name, *map(str, arguments)])


def program(path: Path) -> str:
    """Returns how a shell calls a program: by name if PATH finds it, else by its path."""
    return path.name if shutil.which(path.name) == str(path) else os.path.relpath(path)
