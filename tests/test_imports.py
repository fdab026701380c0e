"""The import rules of the package's rooms, as docs/architecture.md states them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gpt2_accel"
LEAVES = ("cli", "cores", "doctor", "errors", "files", "device", "optim", "shipped", "tokenizer")
# From the bottom up: a room may import the leaves and the rooms before it, except pairs in `SIDE_BY_SIDE`.
ROOMS = (
    *("config", "data", "kernels", "models", "hf", "checkpoint", "evals", "generation"),
    *("estimate", "runtime", "report", "train", "command"),
)
SIDE_BY_SIDE = [
    ("config", "data"),
    ("evals", "generation"),
    ("data", "kernels"),
    ("data", "models"),
]
OF_LEAVES = {
    "optim": {"device"},
    "tokenizer": {"errors"},
    "cli": {"errors", "shipped"},
    "doctor": {"device", "errors"},
}
# The package's `__init__.py` and `__main__.py`, and former names of modules.
ALIASES = {
    "__init__": {"hf", "models"},
    "__main__": {"command"},
    "model": {"models"},
    "generate": {"generation"},
}
USE_ACCELERATE = {"train", "runtime", "checkpoint", "evals", "estimate"}


def modules():
    return [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]


def room(name):
    """Returns the room of a module: the first part of its path or dotted name below the package."""
    return Path(str(name).replace(".py", "").replace(".", "/")).parts[0]


def imports(path):
    """Yields the dotted names that a module imports, also inside functions."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "gpt2_accel":
                yield from (f"gpt2_accel.{alias.name}" for alias in node.names)
            else:
                yield node.module


def allowed(name):
    """Returns the rooms and leaves that a room may import."""
    if name in ALIASES:
        return ALIASES[name]
    if name in LEAVES:
        return OF_LEAVES.get(name, set())
    beside = {other for pair in SIDE_BY_SIDE if name in pair for other in pair} - {name}
    return {*LEAVES, *ROOMS[: ROOMS.index(name) + 1]} - beside


def test_every_module_belongs_to_a_room():
    assert {room(path) for path in modules()} == {*LEAVES, *ROOMS, *ALIASES}


@pytest.mark.parametrize("name", [*LEAVES, *ROOMS, *ALIASES])
def test_a_room_imports_only_allowed_rooms(name):
    for path in modules():
        if room(path) == name:
            own = {
                n.removeprefix("gpt2_accel.") for n in imports(path) if n.startswith("gpt2_accel.")
            }
            found = {room(n) for n in own}
            assert found <= allowed(name), f"{path} imports {found - allowed(name)}"


def test_rooms_that_import_accelerate():
    found = {
        room(path) for path in modules() if any(room(n) == "accelerate" for n in imports(path))
    }
    assert found == USE_ACCELERATE
