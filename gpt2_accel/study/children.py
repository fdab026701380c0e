"""Child processes of a study: recipes that run in forks of this process, one per GPU or CPU core.

The parent has imported what recipes import, so a child starts in a tenth of a second. It never computes and never touches
a GPU: a fork of a process that has would fail or hang.
"""

import functools
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import tqdm
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

import gpt2_accel.train
from gpt2_accel.cores import stay_on, usable_cores, usable_cpus
from gpt2_accel.device import accelerator_count
from gpt2_accel.estimate.dry_run import read_launch
from gpt2_accel.files import first_line

tqdm.tqdm.monitor_interval = 0  # no second thread, whose locks a fork would copy

GRACE = 30.0  # seconds in which a child that has to stop may save a checkpoint
WATCH = 1.0  # seconds between looks of a child at its parent


@dataclass(frozen=True)
class Slot:
    """Where one run at a time may train: environment variables, and the number of a CPU core, None for all."""

    env: Mapping[str, str] = field(default_factory=dict)
    core: int | None = None


def slots(limit: int | None, env: Mapping[str, str]) -> list[Slot]:
    """Returns a slot for each GPU, or for each CPU core that this process may run on if there is none or `env` asks for the
    CPU; at most `limit`.

    GPUs are those of the inherited CUDA_VISIBLE_DEVICES, which may hold UUIDs.
    """
    on_cpu = {**os.environ, **env}.get("ACCELERATE_USE_CPU", "").lower() == "true"
    count = 0 if on_cpu else ask(accelerator_count)
    if count:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = [name.strip() for name in names if name.strip()] or [*map(str, range(count))]
        found = [Slot({"CUDA_VISIBLE_DEVICES": device}) for device in devices[:count]]
    else:
        cores = usable_cores() or range(usable_cpus())
        found = [Slot({"OMP_NUM_THREADS": "1"}, core) for core in cores]
    return found[:limit]


class Child:
    """A recipe that runs in a fork of this process, with `arguments`, in `slot`. Output is appended to the file `output`.

    It stops as after a signal, with a checkpoint, when this process ends or `superseded` returns True.
    """

    def __init__(
        self,
        recipe: Path,
        arguments: Sequence[str],
        slot: Slot,
        env: Mapping[str, str],
        output: Path,
        superseded: Callable[[], bool] = lambda: False,
    ):
        self.slot, self.begun = slot, time.monotonic()
        self.code: int | None = None
        self._killed_at: float | None = None
        recipe_source(recipe)  # before the fork

        def run() -> int:
            redirect(output)
            occupy(slot)
            os.environ.update({**env, **slot.env})
            watch(os.getppid(), superseded)
            return exit_code(recipe, arguments)

        self.pid = fork(run)

    def ended(self) -> bool:
        """Whether the child has ended, with the exit code `code`, negative after a signal."""
        if self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
            elif self._killed_at is not None and time.monotonic() > self._killed_at:
                self._signal(signal.SIGKILL)
        return self.code is not None

    def wait(self) -> int:
        """Waits for the child's end; returns its exit code."""
        while not self.ended():
            time.sleep(WATCH / 10)
        return self.code or 0

    def stop(self) -> None:
        """Asks the child to stop with a checkpoint; after `GRACE` seconds `ended` kills it."""
        if self.code is None and self._killed_at is None:
            self._killed_at = time.monotonic() + GRACE
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def ask(function: Callable[[], Any]) -> Any:
    """Returns the JSON value that `function` returns in a fork of this process. Raises `ValueError` with its message if it
    raises one of a user error, and `RuntimeError` for another."""
    read, write = os.pipe()
    parent = os.getpid()

    def answer() -> int:
        os.close(read)
        watch(parent, lambda: False)
        try:
            found = {"value": function()}
        except (ValueError, OSError, ImportError) as error:
            found = {"error": first_line(error)}
        with open(write, "w", encoding="utf-8") as pipe:
            json.dump(found, pipe)
        return 0

    pid = fork(answer)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        raise RuntimeError("a child process ended without an answer: see its traceback above")
    found = json.loads(text)
    if "error" in found:
        raise ValueError(found["error"])
    return found["value"]


def fork(function: Callable[[], int]) -> int:
    """Starts `function` in a fork of this process, in a process group of its own; returns the process id. Its return value
    is the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not gc.get_freeze_count():
        gc.freeze()  # so that the garbage collector does not copy the pages that parent and child share
    if pid := os.fork():
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # by parent and child: whichever comes first
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """Ends a fork, without the exit handlers of its parent."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def redirect(output: Path) -> None:
    """Appends this process's output to a file, and closes its input."""
    output.parent.mkdir(parents=True, exist_ok=True)
    for number, path in ((0, os.devnull), (1, output), (2, output)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), number)


def occupy(slot: Slot) -> None:
    """Keeps this process on the slot's CPU core, with one thread."""
    if slot.core is not None:
        stay_on(slot.core)
        torch.set_num_threads(1)


def watch(parent: int, superseded: Callable[[], bool]) -> None:
    """Starts a thread that stops this process when its parent has ended or `superseded` returns True."""

    def look() -> None:
        while os.getppid() == parent and not superseded():
            time.sleep(WATCH)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


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


def exit_code(recipe: Path, arguments: Sequence[str]) -> int:
    """Runs a recipe; returns its exit code, and prints its last message."""
    try:
        run_recipe(recipe, arguments)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


class Captured(BaseException):
    """Carries the settings out of a recipe that has called `train`."""


def settings_of(recipe: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the settings with which a recipe calls `train`, as the command line `arguments` change them. The recipe
    prepares its data, if it does, and trains nothing.

    Raises `ValueError` with the recipe's message if it refuses them, or if it never calls `train`.
    """

    recipe_source(recipe)  # before the fork

    def capture(config: Any) -> NoReturn:
        raise Captured(config.settings())

    def run() -> dict[str, Any]:
        gpt2_accel.train.train = capture
        try:
            run_recipe(recipe, arguments)
        except Captured as found:
            return found.args[0]
        except SystemExit as end:
            raise ValueError(str(end.code)) from end
        raise ValueError(f"{recipe.name} ended without training: see its message above")

    return ask(run)


def launch_environment(path: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the environment variables that `accelerate launch` sets for one process by the config file `path`, and what of
    them changes a run's numbers: the precision and the compiler.

    Without a file there are none: fp32, uncompiled. Raises `FileNotFoundError` if it is missing, `ValueError` if it is for
    several processes.
    """
    env: dict[str, str] = {}
    if path is not None:
        launch = read_launch(path)
        if launch.num_processes != 1 or launch.is_fsdp2:
            raise ValueError(
                f"{path} is for {launch.num_processes} processes: give a config for one, a study starts a run on each GPU itself"
            )
        words = ["--config_file", path, "recipe.py"]
        options, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
        _, found = prepare_simple_launcher_cmd_env(options)
        env = {name: value for name, value in found.items() if os.environ.get(name) != value}
    names = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}
    seen = {**os.environ, **env}
    return env, {kind: seen.get(name, "no").lower() for kind, name in names.items()}
