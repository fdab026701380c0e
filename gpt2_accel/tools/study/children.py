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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import gpt2_accel
from gpt2_accel.runtime.cores import usable_cpus
from gpt2_accel.runtime.files import digest, first_line

if TYPE_CHECKING:
    from gpt2_accel.tools.study.trials import Trial

GRACE = 30.0  # seconds in which a child that has to stop may save a checkpoint
LOG = "log.txt"  # in a run's folder: its terminal output
PACKAGE = Path(gpt2_accel.__file__).parent
OTHERS = {
    PACKAGE,
    Path(sysconfig.get_paths()["stdlib"]),
}  # folders of modules on which no study depends
INSTALLED = {"site-packages", "dist-packages"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(  # torch._dynamo takes 1.6 s of each run: an optimizer imports it
    ["gpt2_accel.train", "gpt2_accel.cli", "gpt2_accel.tools.study.engine", "torch._dynamo"]
)


def slots(limit: int | None) -> list[str]:
    """Returns where a run at a time trains: the number or UUID of each visible GPU, or an empty text for each CPU core if
    there is no GPU or the launch is for the CPU. At most `limit`."""
    from gpt2_accel.runtime.device import accelerator_count

    found = [""] * usable_cpus()
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    count = 0 if on_cpu else accelerator_count()
    if count:
        visible = re.findall(r"[^\s,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        found = visible or [str(number) for number in range(count)]
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


def train_recipe(trial: "Trial", source: bytes, folder: Path, gpu: str) -> None:
    """Trains a trial in this child and in `folder`, where it resumes; `source` is the text of its recipe. The output is
    appended to `LOG`.

    Raises `SystemExit` if one of the trial's files no longer has its SHA-256.
    """
    stop_with_parent()
    import torch

    output = os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for path, sha in trial.files.items():
        if not Path(path).exists() or digest(Path(path)) != sha:
            sys.exit(f"{path} has changed since the study started: start it again")
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        torch.set_num_threads(1)
    run_recipe(trial.recipe, source, trial.arguments(folder))


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

    def capture(config: Any, **seams: Any) -> NoReturn:
        raise Captured(config.settings())

    gpt2_accel.train.train = capture
    before = set(sys.modules)
    printed = io.StringIO()
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
    found = []
    for name in sorted(names):
        path = Path(getattr(sys.modules[name], "__file__", None) or "")
        other = not OTHERS.isdisjoint(path.parents) or not INSTALLED.isdisjoint(path.parts)
        if path.suffix == ".py" and path.is_file() and not other:
            found.append(path)
    return found
