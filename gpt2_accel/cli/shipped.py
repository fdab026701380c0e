"""Finds and lists the shipped recipes, launch configs and settings."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from gpt2_accel.options import OTHER_COMMANDS
from gpt2_accel.recipe_command import folder


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
    """Returns the message about an unknown name. It lists all names, those like it, or meant by it, first."""
    names = list(names)
    meant = [known for known, others in OTHER_COMMANDS.items() if name in others.split()]
    close = [known for known in meant if known in names] or difflib.get_close_matches(name, names)
    listed = ", ".join([*close, *(other for other in names if other not in close)])
    return f"there is no {what} {name!r}: choose one of {listed}"
