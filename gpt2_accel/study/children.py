"""Child processes of a study: recipes that run in forks of this process, one at a time on each GPU or CPU core.

The parent has imported what recipes import, so a child starts in a tenth of a second. It never computes and never touches
a GPU: a fork of a process that has would fail or hang.
"""

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import psutil
import torch
import tqdm

import gpt2_accel.train
from gpt2_accel.cores import stay_on, usable_cores, usable_cpus
from gpt2_accel.device import accelerator_count
from gpt2_accel.files import digest, first_line
from gpt2_accel.runtime.signals import adopt_orphans, end_with_parent

tqdm.tqdm.monitor_interval = 0  # no second thread, whose locks a fork would copy

SILENCE = 60.0  # seconds without a sign of life of the parent after which a child stops
GRACE = 30.0  # seconds in which a child that has to stop may save a checkpoint
FORK = multiprocessing.get_context("fork")
PACKAGE = Path(gpt2_accel.train.__file__).parent
alive = FORK.Value(
    "d", lock=False
)  # when the parent last showed a sign of life, seconds of `time.monotonic`


class Slot(NamedTuple):
    """Where one run at a time trains: the numbers or UUIDs of its GPUs, or the number of its first CPU core. `processes` are
    those of the run."""

    gpus: str | None
    core: int | None
    processes: int


def slots(limit: int | None, each: int) -> list[Slot]:
    """Returns a slot for every `each` GPUs, or CPU cores that this process may run on if there is no GPU or the launch is for
    the CPU; at most `limit`."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if not on_cpu and (count := ask(accelerator_count)):
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").strip(",")
        gpus = names.split(",") if names else [str(number) for number in range(count)]
        found = [Slot(",".join(gpus[i : i + each]), None, each) for i in range(0, count, each)]
    else:
        cores = (usable_cores() or [*range(usable_cpus())])[::each]
        found = [Slot(None, core, each) for core in cores]
    return found[:limit]


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Starts `function` in a fork of this process, which stops when this process has ended."""
    gc.freeze()  # so that the garbage collector does not copy the pages that parent and child share
    alive.value = time.monotonic()
    process = FORK.Process(target=begin, args=(os.getpid(), function, *arguments))
    process.start()
    return process


def begin(parent: int, function: Callable[..., object], *arguments: object) -> None:
    """Runs `function` in a fork. A thread stops it, with a checkpoint, when the parent has ended or is silent."""
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == parent and time.monotonic() < alive.value + SILENCE:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    function(*arguments)


def stop(processes: Sequence[BaseProcess], grace: float = GRACE) -> None:
    """Stops children, with checkpoints if they save them within `grace` seconds, and waits for their end."""
    for process in processes:
        process.terminate()
    ends = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, ends - time.monotonic()))
        process.kill()
        process.join()


def ask(function: Callable[..., Any], *arguments: object) -> Any:
    """Returns what `function` returns in a fork of this process. Raises `ValueError` with its message if it raises one of a
    user error, and `EOFError` for another."""
    read, write = FORK.Pipe(duplex=False)

    def answer() -> None:
        try:
            write.send(function(*arguments))
        except (ValueError, OSError, ImportError, SystemExit) as error:
            write.send(ValueError(first_line(error)))

    process = start(answer)
    write.close()
    while not read.poll(1):
        alive.value = time.monotonic()
    found = read.recv()
    process.join()
    if isinstance(found, ValueError):
        raise found
    return found


@functools.cache
def recipe_source(recipe: Path) -> bytes:
    """Returns the text of a recipe, read once: runs of one study have one recipe, also if its file changes meanwhile."""
    return recipe.read_bytes()


def run_recipe(recipe: Path, arguments: Sequence[str]) -> None:
    """Runs a recipe as `python RECIPE ARGUMENTS` would. Raises `SystemExit` as it does."""
    sys.argv = [str(recipe), *arguments]
    sys.path[0] = str(recipe.parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(recipe)
    exec(compile(recipe_source(recipe), recipe, "exec"), vars(main))


def train_recipe(
    recipe: Path, arguments: Sequence[str], files: Mapping[str, str], slot: Slot, log: Path
) -> None:
    """Runs a recipe in this process, or for several processes by `accelerate launch`. Its output is appended to `log`.

    Raises `SystemExit` if one of `files` no longer has the SHA-256 here.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for path, sha in files.items():
        if not Path(path).exists() or digest(Path(path)) != sha:
            sys.exit(f"{path} has changed since the study started: start it again")
    if slot.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.gpus
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if slot.processes > 1:
        sys.exit(launch(recipe, arguments, slot.processes))
    if slot.core is not None:
        stay_on(slot.core)
        torch.set_num_threads(1)
    run_recipe(recipe, arguments)


def launch(recipe: Path, arguments: Sequence[str], processes: int) -> int:
    """Runs a recipe by `accelerate launch`, which ends with this process; returns its exit code. Stops the trainers of a
    launcher that was killed."""
    adopt_orphans()
    own = precision(processes)
    flags = ["--multi_gpu", "--num_processes", str(processes), "--main_process_port", "0"]
    flags += ["--mixed_precision", own["mixed_precision"], "--dynamo_backend", own["dynamo"]]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *flags, str(recipe), *arguments],
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )
    signal.signal(signal.SIGTERM, lambda *_: launcher.terminate())
    code = launcher.wait()
    for trainer in psutil.Process().children(recursive=True):
        trainer.terminate()
    return code


class Captured(BaseException):
    """Carries the settings out of a recipe that has called `train`."""


def settings_of(recipe: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the settings with which a recipe calls `train`, as the command line `arguments` change them, and the SHA-256
    of the modules beside it or of its project that it imports, by path. To be called in a fork. The recipe prepares its
    data, if it does, and trains nothing.

    Raises `ValueError` if it never calls `train`, and `SystemExit` with the recipe's message if it refuses the settings.
    """

    def capture(config: Any) -> NoReturn:
        raise Captured(config.settings())

    gpt2_accel.train.train = capture
    before = {*sys.modules}
    try:
        run_recipe(recipe, arguments)
    except Captured as found:
        new = own_modules(sys.modules.keys() - before)
        return found.args[0], {str(path): digest(path) for path in new}
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
