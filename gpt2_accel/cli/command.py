"""The console command `gpt2-accel`: runs recipes, launches training, prints shipped settings.

It finds recipes, launch configs and settings by name, and the launch config that fits this machine.
The process is replaced by the recipe's process or Accelerate's launcher, which receives its signals
and sets its exit code.
"""

import difflib
import os
import sys
from collections.abc import Collection
from itertools import takewhile
from pathlib import Path

from gpt2_accel import __version__, cli
from gpt2_accel.runtime.cores import may_have_gpu
from gpt2_accel.runtime.recipe_command import IN_PROCESS, folder


def by_name(where: str, pattern: str) -> dict[str, Path]:
    """Returns the files of a shipped folder by their name, with hyphens and without suffix."""
    return {hyphened(path.stem): path for path in sorted(folder(where).glob(pattern))}


def hyphened(name: str) -> str:
    """Returns a name with hyphens for underscores."""
    return name.replace("_", "-")


CONFIGS = by_name("accelerate_configs", "*.yaml")
RECIPES = by_name("recipes", "*.py")
SETTINGS = by_name("recipes", "*.[yi]*")  # .yaml, .ipynb
# Ctrl-C ends the launcher without a traceback, but not before the run, which gets it too and saves.
# A sentence of the run is the last line, without tracebacks of the launcher before it.
LAUNCHER = """import logging
import os
import signal
import subprocess
import sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from accelerate.commands.launch import main
interrupts = []
signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
os.environ["GPT2_ACCEL_REPORTS"] = "1"
logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True
try:
    main()
except subprocess.CalledProcessError:
    sys.exit(130 if interrupts else 1)
except Exception as error:
    try:
        text = error.get_first_failure()[1].message["extraInfo"]["py_callstack"]
    except Exception:
        text = "Traceback"
    if "Traceback" in text:
        raise
    text = " ".join(text.partition(": ")[2].split())
    sys.exit(f"{os.path.basename(error.name)}: {text}")"""
SHORT = {"push": "push-to-hub", "import": "import-checkpoint"}
HELP = f"""
Other commands:
  launch CONFIG RECIPE    train with another launch config than the one that fits, as in
                          gpt2-accel launch 8xa100 pretrain-124m --max_steps 1000
                          or print its memory, FLOPs and time, as in
                          gpt2-accel pretrain-124m --dry_run 8xa100 A100
  config NAME             print a launch config or other settings, as in
                          gpt2-accel config 8xa100 > my.yaml
  help, --version         print this page, or the version

CONFIG is a file or one of
  {" ".join(CONFIGS)}
Flags of Accelerate's launcher may stand between CONFIG and RECIPE. `config` also prints
  {" ".join(SETTINGS)}

RECIPE is a name from above, push or import (short for push-to-hub and import-checkpoint), or a .py
file."""


def main() -> None:
    """Runs the command line of `gpt2-accel`."""
    cli.run(lambda: run_command(sys.argv[1:]))


def run_command(words: list[str]) -> None:
    """Runs a command with its arguments. Raises `ValueError` if a name is unknown or missing."""
    command, *args = words or ["--help"]
    name = hyphened(SHORT.get(command, command))
    if name in IN_PROCESS:
        start(RECIPES[name], *args)
    elif command in OTHERS:
        OTHERS[command](*args)
    else:
        launch(*words)


def print_help(*_: str) -> None:
    """Prints the recipes, the other commands and the shipped files."""
    print("usage: gpt2-accel RECIPE [--help | settings], or gpt2-accel COMMAND")
    groups = {"Train": RECIPES.keys() - IN_PROCESS, "Prepare, try, measure": IN_PROCESS}
    for title, names in groups.items():
        print(f"\n{title}:")
        for name in sorted(names):
            source = RECIPES[name].read_text(encoding="utf-8")
            summary = source.partition(".\n")[0].removeprefix('"""')
            print(f"  {name:22}{summary}")
    print(HELP)


def launch(*args: str) -> None:
    """Starts `accelerate launch`.

    `args` are a launch config, flags of the launcher, a recipe and its settings. A recipe without a
    launch config takes the one that fits this machine; a line on stderr names it.
    """
    chosen = list(
        takewhile(lambda word: word[-3:] != ".py" and hyphened(word) not in RECIPES, args)
    )
    if len(chosen) == len(args):
        given = " ".join(args)
        raise ValueError(f"there is no recipe in {given!r}: {choices(given, [*RECIPES, *OTHERS])}")
    name, *options = args[len(chosen) :]
    recipe = find(name, RECIPES)
    if "--help" in options:  # needs no launcher, which takes seconds
        start(recipe, "--help")
        return
    if not chosen or chosen[0].startswith("-"):
        chosen = fitting_launch() + chosen
        print("launch config:", *chosen, file=sys.stderr)
    start(
        "-P",  # a file in the working directory must not be imported in place of a library
        "-c",
        LAUNCHER,
        "--config_file",
        find(chosen[0], CONFIGS),
        *chosen[1:],
        recipe,
        *options,
    )


def print_config(*args: str) -> None:
    """Prints a launch config, or the settings or the notebook of a recipe."""
    path = find(" ".join(args), CONFIGS | SETTINGS)
    sys.stdout.write(path.read_text(encoding="utf-8"))


def start(*arguments: str | Path) -> None:
    """Replaces this process by Python with `arguments`."""
    os.execv(sys.executable, [sys.executable, *map(str, arguments)])


def find(name: str, shipped: dict[str, Path]) -> Path:
    """Returns the user's file of this name, or else the shipped one.

    Raises `ValueError` if there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    known = hyphened(name).partition(".")[0]
    if known not in shipped:
        raise ValueError(f"{name!r} is not a file: {choices(known, shipped)}")
    return shipped[known]


def choices(name: str, known: Collection[str]) -> str:
    """Returns the end of a message about an unknown name: the known names, or the closest ones."""
    close = difflib.get_close_matches(name, known, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(known)}"


def fitting_launch() -> list[str]:
    """Returns the launch config that fits this machine, and the launcher's flags that it needs.

    A CPU with bf16 units also gets `cpu`: compiled bf16, which is faster, takes a minute to start.
    """
    if not may_have_gpu():
        return ["cpu"]
    from gpt2_accel.runtime.device import accelerator_count, has_bf16, launch_device

    device = launch_device()
    bf16 = has_bf16(device)
    gpus = accelerator_count()
    if device.type in ("cpu", "mps"):
        return [device.type]
    if gpus == 1:
        return ["1xgpu" if bf16 else "1xt4-fp16"]
    return ["8xa100" if bf16 else "2xt4-fp16", "--num_processes", str(gpus)]


OTHERS = {
    "help": print_help,
    "-h": print_help,
    "--help": print_help,
    "--version": lambda *_: print(f"gpt2_accel {__version__}"),
    "launch": launch,
    "config": print_config,
}
