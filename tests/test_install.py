"""The installed wheel is the whole toolkit, and each `pip install` names known packages.

`make test` installs the wheel beside the libraries of the running environment. `make test-install`
makes fresh environments, for which it downloads all packages in the versions of constraints.txt.
"""

import configparser
import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import make_text, read_json, small_notebook
from launching import ROOT

LONG = os.environ.get("INSTALL") == "long"
FOLDERS = ("recipes", "accelerate_configs", "benchmarks", "course")  # inside the package in a wheel
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SMALL = "--n_layer 1 --n_head 2 --n_embd 16 --n_positions 32 --micro_batch_size 2"
SMALL += " --total_batch_size 128 --max_steps 3 --eval_every 0 --sample_every 0"
PINNED = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}

# Runs every recipe up to its `main`, which includes imports of other recipes and of benchmarks.
IMPORTS = """
import runpy, sys, gpt2_accel, gpt2_accel.tools.course
from gpt2_accel.cli.command import RECIPES
sys.modules["gradio"] = None  # takes seconds to import
sys.path.insert(0, str(RECIPES["sample"].parent))
for path in RECIPES.values():
    runpy.run_path(str(path))
print(gpt2_accel.__file__)
"""


def environment(bin_folder: Path) -> dict[str, str]:
    """Returns the variables of a shell with an activated environment, away from the clone."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return ours | PINNED | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}


def done(command: str | list, cwd: Path, env: dict | None = None) -> str:
    """Runs a command that has to succeed; returns its stdout."""
    words = command.split() if isinstance(command, str) else command
    ended = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, f"{words}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def copy_of_clone(folder: Path) -> Path:
    """Copies what the package is built from: a build writes into its source folder."""
    folder.mkdir()
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("gpt2_accel", *FOLDERS):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without network unless `LONG`."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_of_clone(folder / "source")
    offline = [] if LONG else ["--no-build-isolation"]
    done([*PIP, "wheel", "--quiet", "--no-deps", *offline, "-w", folder, source], folder)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` folder of an environment with the wheel, unless `LONG` with our libraries."""
    place = tmp_path_factory.mktemp("installed") / "env"
    alone = [] if LONG else ["--without-pip"]
    done([sys.executable, "-m", "venv", *alone, place], place.parent)
    offline = [] if LONG else ["--no-deps"]
    install = [*PIP, "--python", place / "bin/python", "install", "--quiet", *offline, wheel]
    done(install, place.parent, os.environ | PINNED)
    if not LONG:
        [packages] = place.glob("lib/python*/site-packages")
        # After the environment's own packages, and without the .pth file that points at the clone.
        (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    return place / "bin"


def test_the_wheel_holds_every_shipped_file(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    shipped = {f"gpt2_accel/{path.relative_to(ROOT)}" for name in FOLDERS for path in files(name)}
    shipped = {name for name in shipped if "benchmarks/results/" not in name}
    course = {name for name in shipped if name.startswith("gpt2_accel/course/")}
    shipped -= {name for name in course if name.endswith((".ipynb", ".md"))}
    package = {str(path.relative_to(ROOT)) for path in files("gpt2_accel")}
    assert names == package | shipped


def files(folder: str) -> list[Path]:
    """Returns the files of a folder of the clone, without caches."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path for path in paths if "__pycache__" not in path.parts]


@pytest.mark.skipif(not LONG, reason="in make test-install")
def test_a_recipe_of_the_installed_wheel_trains(installed, data_dir, tmp_path):
    env = environment(installed)
    (tmp_path / "accelerate.py").write_text("raise ImportError('the wrong accelerate')")
    where = done(["python", "-P", "-c", IMPORTS], tmp_path, env)
    assert Path(where).is_relative_to(installed.parent)
    train = f"gpt2-accel launch cpu quickstart --data_dir {data_dir} --output_dir runs/mine"
    output = done(f"{train} {SMALL}", tmp_path, env)
    assert "gpt2-accel sample --model runs/mine" in output


@pytest.mark.skipif(not LONG, reason="installs for minutes: make test-install")
@pytest.mark.parametrize("place", ["a clone", "an installed wheel"])
def test_the_notebook_runs_from_its_first_cell(place, request, tmp_path):
    if place == "a clone":
        folder, env = copy_of_clone(tmp_path / "clone") / "recipes", tmp_path / "env"
        done([sys.executable, "-m", "venv", env], tmp_path)
        bin_folder = env / "bin"
    else:
        folder = tmp_path
        bin_folder = request.getfixturevalue("installed")
    env = environment(bin_folder) | {"ACCELERATE_USE_CPU": "true"}
    done("python -m pip install --quiet ipykernel nbclient", tmp_path, env)
    (folder / "notebook.ipynb").write_text(json.dumps(small_notebook()))
    (folder / "text.txt").write_text(make_text(3000, 0))
    done("jupyter-execute --inplace notebook.ipynb", folder, env)
    cells = read_json(folder / "notebook.ipynb")["cells"]
    shown = [output.get("text", "") for output in cells[-3]["outputs"]]
    assert "ROMEO:" in str(shown)
    where = done(
        ["python", "-P", "-c", "import gpt2_accel; print(gpt2_accel.__file__)"], folder, env
    )
    assert Path(where).is_relative_to(bin_folder.parent)


def requirements() -> set[str]:
    """Returns the packages with their ranges that setup.cfg names."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return {word for words in lists for word in words.split()}


def test_every_pip_install_names_packages_as_setup_cfg_does():
    paths = [path for folder in ("gpt2_accel", "recipes", "docs") for path in files(folder)]
    paths = [path for path in paths if "docs/course" not in str(path)]  # `make docs` writes it
    texts = [path.read_text() for path in paths if path.suffix in (".py", ".md", ".ipynb")]
    text = "\n".join([*texts, (ROOT / "README.md").read_text()])
    plain = set(re.findall(r"\bpip install (?:-\S+ )*(\w+)", text))
    assert plain == {"git", "dist", "sentencepiece"}
    lines = re.findall(r"\bpip install ('[^`\"\n]+)", text)
    named = {word for line in lines for word in re.findall(r"'([^'{…]+)'", line)}
    # For environments of their own: no extra.
    not_required = {
        "llama-cpp-python[server]==0.3.36",
        "optimum-onnx[onnxruntime]",
        "lm-eval>=0.4.9",
    }
    assert named - requirements() - not_required == set()
    assert len(named) >= 6


FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *venv*) mkdir -p .venv/bin; cp uv .venv/bin; cp $0 .venv/bin/python;;
  *"config list"*) echo "$INDEX";;
  -c*) exit 1;;  # there is no GPU
  *) echo python "$@";;
esac
"""


@pytest.mark.parametrize(
    ("uv", "torch", "index", "words"),
    [
        ("exit 0", "", "", "uv pip install --python .venv/bin/python --torch-backend cpu torch=="),
        ("exit 1", "", "", "pip installs torch with CUDA, about 3 GB"),
        ("exit 0", "cuda", "", ""),
        ("exit 0", "", "global.index-url=x", ""),
    ],
)
def test_make_installs_torch_for_cpus_first(uv, torch, index, words, tmp_path):
    """By uv, unless pip has its own index or TORCH=cuda. With programs that only print."""
    python = tmp_path / "python"
    for name in ("Makefile", "constraints.txt", "setup.cfg", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python.write_text(FAKE_PYTHON)
    (tmp_path / "uv").write_text(f'#!/bin/sh\necho uv "$@"\n{uv}\n')
    for program in (python, tmp_path / "uv"):
        program.chmod(0o755)
    command = ["make", ".venv/installed", f"PYTHON={python}", f"TORCH={torch}"]
    output = done(command, tmp_path, os.environ | {"INDEX": index})
    assert words in output
    assert ("uv pip" in output) == bool(words)
    last = [line for line in output.splitlines() if line.startswith("python")][-1]
    assert last.startswith("python -m pip") and last.endswith("--editable .")
