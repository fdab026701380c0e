"""Which package may import which, as docs/architecture.md states it."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gpt2_accel"
# The rooms from the bottom up: a module imports its own room and those of earlier lines.
ROOMS = """
    rounding
    batch_size runtime.cores runtime.device runtime.files runtime.recipe_command
    runtime.options runtime.progress runtime.signals tokenizer
    config
    data optim
    kernels
    models
    hf
    checkpoint __init__
    generation
    evals
    estimate
    runtime
    run tuning charts
    saving preferences rewards first_model pushes
    callbacks lifecycle
    setup
    train
    tools
    cli
    __main__
"""
LEVELS = {room: n for n, line in enumerate(ROOMS.splitlines()) for room in line.split()}
DESCRIBES = ("metadata", "run")  # the type of what it describes, which uses the description
USE_ACCELERATE = "run saving rewards lifecycle setup callbacks runtime checkpoint evals estimate"


def room_of(module: str) -> str:
    """Returns the longest entry of `ROOMS` that a module's dotted name begins with."""
    parts = module.replace("__version__", "__init__").split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(name for name in names if name in LEVELS)


def imports(path: Path) -> list[str]:
    """Returns the dotted names that a module imports, also for annotations only, in their order."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += parts if node.module == "gpt2_accel" else [node.module]
    return modules


def test_a_room_imports_only_rooms_below_it():
    for path in PACKAGE.rglob("*.py"):
        importer = room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        for name in imports(path):
            package, _, module = name.partition(".")
            if package == "gpt2_accel" and module and (path.stem, module) != DESCRIBES:
                room = room_of(module)
                assert room == importer or LEVELS[room] < LEVELS[importer], f"{path}: {name}"
            assert package != "accelerate" or importer in USE_ACCELERATE.split(), path


def test_help_and_a_wrong_option_import_no_torch():
    """For all recipes: they take less than half a second."""
    recipes = PACKAGE.parent / "recipes"
    names = sorted(path.stem for path in recipes.glob("*.py"))
    code = f"import runpy, sys; sys.path[0] = {str(recipes)!r}\nfor name in {names}:\n"
    code += "  for word in ('--wrong', '--help'):\n"
    code += "    sys.argv = [name, word]\n"
    code += "    try: runpy.run_path(f'{sys.path[0]}/{name}.py', run_name='__main__')\n"
    code += "    except SystemExit as end: ended = end.code\n"
    code += "    print('@', ended)\n"
    code += "print('@', *{'torch', 'accelerate', 'transformers', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    *ends, loaded = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert loaded == "@"
    for name, wrong, shown in zip(names, ends[::2], ends[1::2], strict=True):
        assert wrong.startswith(f"@ {name}.py: ")
        assert shown == "@ 0", name


# Prints which of `HEAVY` are loaded after each step that a user waits for. Then trains, evaluates
# and samples with the recipes' folder, which has an `evaluate.py`, first on the path.
STEPS = """
import sys
HEAVY = "torch torch.distributed.tensor torch.distributed.fsdp torch._dynamo".split()
HEAVY += ["torch._inductor", "sympy", "accelerate", "transformers"]
HEAVY += ["transformers.modeling_utils", "datasets", "evaluate"]
HEAVY += "pyarrow pandas scipy sklearn matplotlib wandb tensorboard tiktoken".split()

def loaded():
    print(*(name for name in HEAVY if name in sys.modules))

import gpt2_accel.data.prepare, gpt2_accel.data.rows
loaded()
from gpt2_accel.train import train
loaded()

from gpt2_accel.config import TrainConfig
from gpt2_accel.generation.sampling import Sampling, complete, load

data_dir, output_dir, sys.path[0] = sys.argv[1:]
shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 32}
batch = {"total_batch_size": 32, "micro_batch_size": 1, "max_steps": 1, "eval_tokens": 64}
train(TrainConfig(data_dir, output_dir, eval_every=1, **shape, **batch))
complete(*load(output_dir), ["a"], Sampling(max_new_tokens=2))
import gpt2_accel.evals.chat, gpt2_accel.evals.core
import gpt2_accel.evals.hellaswag, gpt2_accel.evals.perplexity
print(*{"evaluate", "datasets"} & {*sys.modules})
"""


def test_heavy_libraries_are_imported_where_they_are_used(data_dir, tmp_path):
    """Training, evaluation and sampling do not import the library of metrics: seconds."""
    arguments = [data_dir, tmp_path / "run", PACKAGE.parent / "recipes"]
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    tokenizing, training, *_, last = done.stdout.splitlines()
    assert tokenizing == ""
    assert training == "torch accelerate"
    assert last == ""


def test_a_recipe_imports_the_package_before_torch():
    """The package sets how torch's threads wait, which torch reads when it is imported."""
    recipes = sorted((PACKAGE.parent / "recipes").rglob("*.py"))
    first_party = {"gpt2_accel"} | {path.stem for path in recipes}
    for path in recipes:
        roots = [name.partition(".")[0] for name in imports(path)]
        others = [root for root in roots if root not in sys.stdlib_module_names]
        assert others[0] in first_party, path
