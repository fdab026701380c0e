"""The shipped recipes, launch configs and settings by name, and the launch config that fits this machine."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from gpt2_accel.cores import may_have_gpu
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
    return {plain_name(path): path for path in sorted(folder(where).glob(pattern))}


def plain_name(path: Path) -> str:
    """Returns the name of a file with hyphens for underscores and without suffix."""
    return path.stem.replace("_", "-")


def find(what: str, name: str, shipped: dict[str, Path]) -> Path:
    """Returns the user's file of this name, or else the shipped one.

    Raises `ValueError` if there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.parent.name or plain_name(path) not in shipped:
        raise ValueError(unknown(what, name, shipped))
    return shipped[plain_name(path)]


def unknown(what: str, given: str, names: Iterable[str]) -> str:
    """Returns the message about words that name nothing: the name that one of them is like, or all names."""
    names = list(names)
    close = [n for word in given.split() for n in difflib.get_close_matches(word, names, n=1)]
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
    return f"there is no {what} {given!r}: {hint}"


def fitting_launch() -> list[str]:
    """Returns the name of the shipped launch config that fits this machine, and the launcher's flags that it needs."""
    if not may_have_gpu():
        return ["cpu"]
    from gpt2_accel.device import accelerator_count, has_bf16, launch_device

    device = launch_device()
    return fitting(device.type, accelerator_count(), has_bf16(device))


def fitting(kind: str, gpus: int, bf16: bool) -> list[str]:
    """Returns what `fitting_launch` returns, for `gpus` devices of a type such as `cuda`.

    A CPU gets `cpu` also if it has bf16 units: compiled bf16, which is faster, takes a minute to start.
    """
    if kind in ("cpu", "mps"):
        return [kind]
    if gpus == 1:
        return ["1xgpu" if bf16 else "1xt4-fp16"]
    if bf16 and gpus == 4:
        return ["4xa100"]
    name, count = ("8xa100", 8) if bf16 else ("2xt4-fp16", 2)
    return [name] if gpus == count else [name, "--num_processes", str(gpus)]
