"""Child processes of a study: recipes that train beside each other, one at a time on each GPU or CPU core.

Python's fork server has imported what recipes import, so a child starts in a fraction of a second. A child stops when the
process that started it has ended.
"""

import io
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import gpt2_accel
from gpt2_accel.runtime.cores import usable_cpus
from gpt2_accel.runtime.files import digest, first_line
from gpt2_accel.runtime.signals import end_with_parent

GRACE = 30.0  # seconds in which a child that has to stop may save a checkpoint
PACKAGE = Path(gpt2_accel.__file__).parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(  # torch._dynamo takes 1.6 s of each run: an optimizer imports it
    ["gpt2_accel.train", "gpt2_accel.cli", "gpt2_accel.tools.study.outcome", "torch._dynamo"]
)


def slots(limit: int | None, each: int) -> list[str]:
    """Returns where a run at a time trains: the numbers or UUIDs of `each` GPUs, or an empty text for each `each` CPU cores
    if there is no GPU or the launch is for the CPU. At most `limit`. Raises `ValueError` if there are fewer GPUs."""
    from gpt2_accel.runtime.device import accelerator_count

    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if not on_cpu and (count := accelerator_count()):
        names = re.findall(r"[^\s,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        gpus = names or [str(number) for number in range(count)]
        found = [",".join(gpus[i : i + each]) for i in range(0, count - each + 1, each)]
        if not found:
            raise ValueError(f"gpus_per_run is {each}: give at most the {count} that are visible")
    else:
        found = [""] * max(1, usable_cpus() // each)
    return found[:limit]


def prepare() -> None:
    """Starts the fork server, which imports torch while this process does other things."""
    forkserver.ensure_running()


def stop_with_parent() -> None:
    """Starts a thread that stops this process when the one that started it has ended."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def stop(process: BaseProcess) -> None:
    """Ends a child, with a checkpoint if it saves it within `GRACE` seconds, and waits for its end."""
    process.terminate()
    process.join(GRACE)
    process.kill()
    process.join()


def ask(function: Callable[..., Any], *arguments: object) -> Any:
    """Returns what `function` returns in a child. Raises `ValueError` with its message if it raises one of a user error."""
    with ProcessPoolExecutor(1, FORKS, stop_with_parent) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except (ValueError, OSError, ImportError, SystemExit) as error:
            raise ValueError(first_line(error)) from error
        except (BrokenProcessPool, EOFError) as error:
            raise ValueError(
                "the process that reads the recipe's settings was killed: start the study again"
            ) from error


def run_recipe(recipe: Path, source: bytes, arguments: Sequence[str]) -> None:
    """Runs a recipe as `python RECIPE ARGUMENTS` would, with `source` as its text. Raises `SystemExit` as it does."""
    sys.argv = [str(recipe), *arguments]
    sys.path[0] = str(recipe.parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(recipe)
    exec(compile(source, recipe, "exec"), vars(main))


def train_recipe(
    recipe: Path,
    source: bytes,
    arguments: Sequence[str],
    files: Mapping[str, str],
    gpus: str,
    processes: int,
    log: Path,
) -> None:
    """Trains a run in this child, or in several processes with the launcher of torchrun. Its output is appended to `log`.

    Raises `SystemExit` if one of `files` no longer has the SHA-256 here.
    """
    stop_with_parent()
    import torch

    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for path, sha in files.items():
        if not Path(path).exists() or digest(Path(path)) != sha:
            sys.exit(f"{path} has changed since the study started: start it again")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        torch.set_num_threads(1)
    if processes == 1:
        return run_recipe(recipe, source, arguments)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    free_port = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(1, 1, processes, **free_port, max_restarts=0, start_method="fork")
    elastic_launch(config, one_of_several)(os.getpid(), recipe, source, arguments)


def one_of_several(parent: int, recipe: Path, source: bytes, arguments: Sequence[str]) -> None:
    """Trains one process of a run of several. Ends when the launcher, the process `parent`, ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the launcher's handler
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    run_recipe(recipe, source, arguments)


class Captured(BaseException):
    """Carries the settings out of a recipe that has called `train`."""


def settings_of(
    recipe: Path, source: bytes, arguments: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the settings with which a recipe calls `train`, as the command line `arguments` change them, and the SHA-256
    of the modules beside it or of its project that it imports, by path. To be called in a child. The recipe prepares its
    data, if it does, and trains nothing; what it prints is shown only if it never calls `train`.

    Raises `ValueError` if it never calls `train`, and `SystemExit` with the recipe's message if it refuses the settings.
    """
    import gpt2_accel.train

    def capture(config: Any) -> NoReturn:
        raise Captured(config.settings())

    gpt2_accel.train.train = capture
    before, printed = {*sys.modules}, io.StringIO()
    try:
        with redirect_stdout(printed):
            run_recipe(recipe, source, arguments)
    except Captured as found:
        new = own_modules(sys.modules.keys() - before)
        return found.args[0], {str(path): digest(path) for path in new}
    except SystemExit as error:
        if isinstance(error.code, str):
            raise
    print(printed.getvalue())
    raise ValueError(f"{recipe.name} ended without training: see its message above")


def own_modules(names: Iterable[str]) -> list[Path]:
    """Returns the files of those modules that are not installed, nor Python's or this package's."""
    files = {getattr(sys.modules[name], "__file__", None) or "" for name in names}
    others = {PACKAGE, Path(sysconfig.get_paths()["stdlib"])}
    return [
        path
        for path in map(Path, sorted(files))
        if path.suffix == ".py" and path.is_file() and not others & {*path.parents}
        if not {"site-packages", "dist-packages"} & {*path.parts}
    ]


def precision(processes: int) -> dict[str, str]:
    """Returns what of the launch of a run changes its numbers: its precision, its compiler, and the number of its processes if
    it is above 1. Runs have those of this process, which `accelerate launch` sets."""
    names = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}
    found = {kind: os.environ.get(name, "no").lower() for kind, name in names.items()}
    return found | ({"processes": str(processes)} if processes > 1 else {})
