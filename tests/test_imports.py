"""Who may import whom: the layout that keeps each part readable by itself."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gpt2_accel"
# What each module may import of this package; `train` may import everything.
ALLOWED = {
    "__init__": {"convert", "model"},
    "files": set(),
    "guard": set(),
    "build": {
        "config",
        "convert",
        "data/loader",
        "data/shards",
        "evals/sources",
        "evals/tasks",
        "evals/validation",
        "launch",
        "model",
        "optim",
        "tokenizer",
    },
    "launch": set(),
    "dry_run": {"build", "config", "data/shards", "launch", "loss", "metrics", "model"},
    "fit": {"config", "dry_run", "launch", "model"},
    "stopping": set(),
    "cli": set(),
    "fused": set(),
    "gelu": set(),
    "attention": {"fused"},
    "loss": {"fused"},
    "model": {"attention", "gelu", "loss"},
    "tokenizer": set(),
    "optim": set(),
    "progress": set(),
    "metrics": {"files", "progress"},
    "summary": {
        "config",
        "data/loader",
        "data/shards",
        "dry_run",
        "hub",
        "launch",
        "metrics",
        "model",
        "optim",
        "progress",
    },
    "trackers": {"config", "hub", "metrics", "summary"},
    "runs": {"checkpoint", "data/shards", "metrics", "model"},
    "pictures": {"hub", "model", "runs"},
    "report": {"checkpoint", "convert", "files", "pictures", "progress", "runs", "tokenizer"},
    "hub": {"evals/sources", "files"},
    "config": {"hub", "optim"},
    "data/__init__": set(),
    "data/foreign": {"tokenizer"},
    "data/shards": {"data/foreign", "files"},
    "data/loader": {"data/shards"},
    "data/documents": set(),
    "data/sources": {"data/documents"},
    "data/hub": {"data/documents", "data/sources"},
    "data/plan": {"data/documents", "data/shards", "tokenizer"},
    "data/tokenizing": {"data/documents", "data/plan", "data/shards", "files", "tokenizer"},
    "data/assembly": {"data/plan", "data/shards", "data/tokenizing", "files", "tokenizer"},
    "data/prepare": {
        "data/assembly",
        "data/plan",
        "data/shards",
        "data/sources",
        "data/tokenizing",
        "files",
    },
    "data/cluster": {
        "data/assembly",
        "data/documents",
        "data/plan",
        "data/prepare",
        "data/shards",
        "data/tokenizing",
        "tokenizer",
    },
    "data/stats": {"data/loader", "data/shards", "tokenizer"},
    "convert": {"files", "hub", "model", "weights"},
    "neighbours": {"convert", "model", "weights"},
    "weights": set(),
    "kv_cache": {"launch", "model"},
    "generate": {"checkpoint", "config", "convert", "kv_cache", "model", "tokenizer"},
    "wholeness": {"files"},
    "tensors": {"convert", "model"},
    "checkpoint": {"convert", "files", "hub", "launch", "model", "tensors", "wholeness"},
    "evals/__init__": set(),
    "evals/sources": set(),
    "evals/scores": set(),
    "evals/metrics": {"evals/scores"},
    "evals/detokenize": set(),
    "evals/harness": set(),
    "evals/table": set(),
    "evals/scoring": {"tensors", "tokenizer"},
    "evals/validation": {"data/loader", "evals/scores"},
    "evals/hellaswag": {"evals/scores", "evals/scoring", "evals/sources"},
    "evals/lambada": {"evals/scores", "evals/scoring"},
    "evals/perplexity": {
        "evals/detokenize",
        "evals/scores",
        "evals/scoring",
        "tensors",
        "tokenizer",
    },
    "evals/tasks": {
        "data/loader",
        "data/shards",
        "evals/hellaswag",
        "evals/lambada",
        "evals/perplexity",
        "evals/scoring",
        "evals/sources",
        "evals/validation",
        "model",
        "tokenizer",
    },
}
KNOW_ACCELERATE = {
    "train",
    "build",
    "dry_run",
    "fit",
    "launch",
    "summary",
    "trackers",
    "checkpoint",
    "tensors",
    *(
        f"evals/{name}"
        for name in [
            "validation",
            "scoring",
            "hellaswag",
            "lambada",
            "perplexity",
            "harness",
            "tasks",
        ]
    ),
}


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
