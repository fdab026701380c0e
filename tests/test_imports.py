"""Who may import whom: the layout that keeps each part readable by itself."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gpt2_accel"
# What each module may import of this package; `train` may import everything.
ALLOWED = {
    "__init__": {"convert", "model"},
    "files": set(),
    "guard": set(),
    "launch": set(),
    "stopping": set(),
    "cli": set(),
    "model": set(),
    "tokenizer": set(),
    "optim": set(),
    "progress": set(),
    "metrics": {"files", "progress"},
    "summary": {"config", "data/loader", "data/shards", "hub", "metrics", "model", "progress"},
    "trackers": {"config", "hub", "metrics", "summary"},
    "runs": {"checkpoint", "data/shards", "metrics", "model"},
    "pictures": {"hub", "model", "runs"},
    "report": {"checkpoint", "convert", "files", "pictures", "progress", "runs", "tokenizer"},
    "hub": set(),
    "config": {"hub", "optim"},
    "data/__init__": set(),
    "data/shards": set(),
    "data/loader": {"data/shards"},
    "data/prepare": {"data/shards", "files", "tokenizer"},
    "convert": {"files", "hub", "model", "weights"},
    "neighbours": {"convert", "model", "weights"},
    "weights": set(),
    "generate": {"model", "tokenizer"},
    "checkpoint": {"convert", "files", "hub", "model"},
    "evals/__init__": set(),
    "evals/validation": {"data/loader"},
}
KNOW_ACCELERATE = {"train", "launch", "checkpoint", "evals/validation", "summary", "trackers"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "gpt2_accel":
            yield from (f"gpt2_accel.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_modules_import_only_what_the_layout_allows():
    modules = {p.relative_to(PACKAGE).with_suffix("").as_posix(): p for p in PACKAGE.rglob("*.py")}
    assert set(modules) == {*ALLOWED, "train"}, "a new module needs its place in the layout"
    for module, path in modules.items():
        names = set(imports(path))
        own = {
            n.removeprefix("gpt2_accel.").replace(".", "/")
            for n in names
            if n.startswith("gpt2_accel")
        }
        if module != "train":
            assert own <= ALLOWED[module], f"{module} imports {own - ALLOWED[module]}"
        knows = any(name.split(".")[0] == "accelerate" for name in names)
        assert knows == (module in KNOW_ACCELERATE), module
        assert "train" not in own
