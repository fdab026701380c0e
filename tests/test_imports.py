"""Which package may import which, as docs/architecture.md states it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.tokenizer import byte_tokenizer

PACKAGE = Path(__file__).parent.parent / "gpt2_accel"
LEAVES = (
    *("cores", "files", "device", "muon", "optim", "options"),
    *("progress", "recipe_command", "tokenizer"),
)
# From the bottom up: a package may import the leaves and the packages before it, except pairs in `SIDE_BY_SIDE`.
PACKAGES = (
    *("config", "data", "kernels", "models", "hf", "checkpoint", "generation", "evals"),
    *("estimate", "runtime", "report", "finish", "train", "study", "cli"),
)
SIDE_BY_SIDE = [
    ("config", "data"),
    ("data", "kernels"),
    ("data", "models"),
]
OF_LEAVES = {
    "muon": {"device"},
    "optim": {"muon"},
    "options": {"cores", "recipe_command"},
    "tokenizer": {"files"},
}
ALIASES = {"__init__": {"hf", "models"}, "__main__": {"cli"}}
USE_ACCELERATE = {"finish", "train", "runtime", "checkpoint", "evals", "estimate"}


def modules():
    return [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]


def package(name):
    """Returns the package of a module: the first part of its path or dotted name below the package."""
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
    """Returns the packages and leaves that a package may import."""
    if name in ALIASES:
        return ALIASES[name]
    if name in LEAVES:
        return OF_LEAVES.get(name, set())
    beside = {other for pair in SIDE_BY_SIDE if name in pair for other in pair} - {name}
    return {*LEAVES, *PACKAGES[: PACKAGES.index(name) + 1]} - beside


def test_every_module_belongs_to_a_package():
    assert {package(path) for path in modules()} == {*LEAVES, *PACKAGES, *ALIASES}


@pytest.mark.parametrize("name", [*LEAVES, *PACKAGES, *ALIASES])
def test_a_package_imports_only_allowed_rooms(name):
    for path in modules():
        if package(path) == name:
            own = {
                n.removeprefix("gpt2_accel.") for n in imports(path) if n.startswith("gpt2_accel.")
            }
            found = {package(n) for n in own}
            assert found <= allowed(name), f"{path} imports {found - allowed(name)}"


def test_packages_that_import_accelerate():
    found = {
        package(path)
        for path in modules()
        if any(package(n) == "accelerate" for n in imports(path))
    }
    assert found == USE_ACCELERATE


# Prints which of `HEAVY` are loaded, after each step that a user waits for.
STEPS = """
import sys
HEAVY = "torch torch.distributed.tensor torch.distributed.fsdp torch._dynamo torch._inductor sympy accelerate".split()
HEAVY += "transformers transformers.modeling_utils datasets evaluate pyarrow pandas scipy sklearn matplotlib".split()
HEAVY += "wandb tensorboard torch.utils.tensorboard tiktoken".split()

def loaded():
    print(*(name for name in HEAVY if name in sys.modules))

import gpt2_accel.data.prepare, gpt2_accel.data.corpus
loaded()
import gpt2_accel.train
loaded()
from gpt2_accel.generation.sampling import Sampling, complete, load
complete(*load(sys.argv[1]), ["a"], Sampling(max_new_tokens=2))
loaded()
"""


def test_settings_are_read_before_torch_is_imported():
    """For the recipes that train: `--help` and a wrong flag take less than a second."""
    code = "import runpy, sys; name = sys.argv[1]; sys.argv = [name, '--lr', '1']\ntry: runpy.run_path(name, run_name='__main__')\n"
    code += "except SystemExit as end: print(end, *{'torch', 'accelerate'} & {*sys.modules})"
    for name in (
        "quickstart",
        "pretrain_124m",
        "shakespeare_fast",
        "finetune_shakespeare",
        "chat_sft",
    ):
        recipe = PACKAGE.parent / f"recipes/{name}.py"
        done = subprocess.run(
            [sys.executable, "-c", code, recipe],
            cwd=recipe.parent,
            capture_output=True,
            text=True,
            timeout=100,
        )
        expected = f"{name}.py: unknown option --lr: did you mean --learning_rate?\n"
        assert done.stdout == expected, done


def test_heavy_libraries_are_imported_where_they_are_used(tmp_path):
    model = GPT(GPTConfig(257, 8, 1, 1, 8))
    save_pretrained(model, tmp_path, byte_tokenizer())
    done = subprocess.run(
        [sys.executable, "-c", STEPS, tmp_path], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    tokenizing, training, sampling = done.stdout.splitlines()
    assert tokenizing == ""
    assert training == "torch accelerate"
    assert sampling == "torch accelerate transformers"
