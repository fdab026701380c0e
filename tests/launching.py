"""Starts recipes as `accelerate launch` or `python` does, in forked processes unless a test needs the real launcher.

Starting Python and importing torch, transformers and accelerate takes several seconds of CPU time, and a launch does it
once for the launcher and once for each process. Forked processes reduce gradients by gloo as well, and get the
environment that Accelerate's launcher computes from its config and flags.
"""

import functools
import hashlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from filelock import FileLock
from torch.distributed import TCPStore

ROOT = Path(__file__).parent.parent
SECONDS = 280  # time limit of one launch
GRACE = 10  # seconds in which the others must end after one process failed
stores: list[TCPStore] = []  # of `hold_store`
servers: list[subprocess.Popen] = []  # of `fork_server`


def launch(
    script: str,
    *args: object,
    processes: int = 1,
    config: str = "cpu",
    launcher: bool = False,
    cwd: Path = ROOT,
    fails: bool = False,
    **env: str,
) -> subprocess.CompletedProcess:
    """Runs `accelerate launch --config_file accelerate_configs/CONFIG.yaml SCRIPT ARGS` on CPUs, in the project's root.

    Flags of the launcher may precede the script's name. For several processes the config "cpu" is replaced by the flags
    `--multi_gpu --num_processes`, as in the docs. With `launcher` the real command runs, in the folder `cwd`.
    """
    flags, environment = launch_flags(script, *args, processes=processes, config=config, **env)
    if launcher:
        command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        return ended(done, fails)
    return forked(*launched(flags, environment), fails=fails)


def ended(done: subprocess.CompletedProcess, fails: bool | None) -> subprocess.CompletedProcess:
    """Returns a process that has to have succeeded, or to have failed; with None either is right."""
    assert fails is None or bool(done.returncode) == fails, (
        f"{done.args}\n{done.stdout}\n{done.stderr}"
    )
    return done


def launch_flags(
    script: str | Path, *args: object, processes: int = 1, config: str = "cpu", **env: str
) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of `accelerate launch` and its environment."""
    where = ["--config_file", str(ROOT / f"accelerate_configs/{config}.yaml")]
    several = ["--num_processes", str(processes), "--main_process_port", free_port()]
    if config == "cpu" and processes > 1:
        where = ["--multi_gpu", *several]
    elif config == "cpu":
        where += ["--num_cpu_threads_per_process", os.environ["OMP_NUM_THREADS"]]
    elif config != "cpu":
        where += several
    if processes > 1 or config != "cpu":
        env = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **env}
    return [*where, *map(str, (script, *args))], {**os.environ, **env}


def python(
    script: str | Path,
    *args: object,
    cwd: Path = ROOT,
    at_import: dict[str, str] | None = None,
    fails: bool | None = False,
    **env: str,
) -> subprocess.CompletedProcess:
    """Runs `python SCRIPT ARGS` in a forked process, which has to succeed unless it `fails`.

    `at_import` are the environment variables that libraries read at import; they need another fork server.
    """
    at_import = at_import or {}
    environment = {**os.environ, **at_import, **env}
    return forked([str(script), *map(str, args)], [environment], cwd, at_import, fails)


def in_process(
    script: str | Path, *args: object, fails: bool = False
) -> subprocess.CompletedProcess:
    """Runs `python SCRIPT ARGS` in this process."""
    argv, output, errors = [str(script), *map(str, args)], io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, argv
    code: object = 0
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    if isinstance(code, str):
        errors.write(code + "\n")
    number = code if isinstance(code, int) else int(code is not None)
    done = subprocess.CompletedProcess(argv, number, output.getvalue(), errors.getvalue())
    return ended(done, fails)


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    """Waits until a condition holds, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


class Started:
    """A launch, or without `processes` a Python script, in forked processes beside the test. Output goes to `log`."""

    def __init__(
        self,
        script,
        *args,
        log: Path,
        processes: int | None = None,
        config: str = "cpu",
        **env: str,
    ):
        environment = {**os.environ, **env}
        argv, environments = [str(script), *map(str, args)], [environment]
        if processes:
            flags = launch_flags(*argv, processes=processes, config=config, **env)
            argv, environments = launched(*flags)
        self.pids = start(argv, environments, ROOT, log, log)

    def poll(self) -> int | None:
        """Returns None while a process runs, then the exit code."""
        codes = ask({"poll": self.pids})
        return None if None in codes else exit_code(codes)

    def wait(self, seconds: float = SECONDS) -> int:
        """Waits and returns the exit code. Kills the processes after `seconds` and raises `TimeoutExpired`."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired("forked processes", seconds)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the running processes."""
        for pid, code in zip(self.pids, ask({"poll": self.pids}), strict=True):
            if code is None:
                os.kill(pid, number)


def launched(flags: list[str], environment: dict[str, str]) -> tuple[list[str], list[dict]]:
    """Returns the script's command line and the environment of each process, as the launcher computes them."""
    before, here = dict(os.environ), Path.cwd()
    os.environ.update(environment)
    os.chdir(ROOT)
    try:
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(flags))
        if args.multi_gpu or args.use_fsdp:
            found = prepare_multi_gpu_env(args)
            several = True
        else:
            _, found = prepare_simple_launcher_cmd_env(args)
            several = False
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
    argv = [args.training_script, *args.training_script_args]
    if not several:
        return argv, [found]
    shared = {
        **found,
        "WORLD_SIZE": str(args.num_processes),
        "LOCAL_WORLD_SIZE": str(args.num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(args.main_process_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = range(args.num_processes)
    return argv, [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks]


def exit_code(codes: list[int]) -> int:
    """Returns the exit code of a launch: that of a process that failed, before those that a signal ended for it."""
    return next((code for code in codes if code > 0), min(codes))


def hold_store(environments: list[dict[str, str]]) -> None:
    """Holds the store that the processes of a launch connect to, as torchrun does, until this process ends."""
    if "TORCHELASTIC_USE_AGENT_STORE" in environments[0]:
        port = int(environments[0]["MASTER_PORT"])
        stores.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))


def start(
    argv: list[str],
    environments: list[dict[str, str]],
    cwd: Path,
    output: Path,
    errors: Path,
    at_import: dict[str, str] | None = None,
) -> list[int]:
    """Starts a script in one forked process per environment; returns the process ids."""
    hold_store(environments)
    files = {"cwd": str(cwd), "output": str(output), "errors": str(errors)}
    return ask({"argv": argv, "envs": environments, **files}, at_import)


def forked(
    argv: list[str],
    environments: list[dict[str, str]],
    cwd: Path = ROOT,
    at_import: dict[str, str] | None = None,
    fails: bool | None = False,
) -> subprocess.CompletedProcess:
    """Runs a script in one forked process per environment, in parallel, and waits for all of them.

    If one fails the others are ended, as by torchrun.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        pids = start(argv, environments, cwd, output, errors, at_import)
        deadline, failed = time.monotonic() + SECONDS, False
        while None in (codes := ask({"poll": pids}, at_import)):
            left = [pid for pid, code in zip(pids, codes, strict=True) if code is None]
            if any(codes) and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE)
                for pid in left:
                    os.kill(pid, signal.SIGTERM)
            if time.monotonic() > deadline:
                for pid in left:
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)
        texts = (path.read_text() for path in (output, errors))
        return ended(subprocess.CompletedProcess(argv, exit_code(codes), *texts), fails)


def ask(request: dict, at_import: dict[str, str] | None = None) -> list:
    """Sends a request to a fork server and returns its answer."""
    server = fork_server(frozenset((at_import or {}).items()))
    server.write(json.dumps(request) + "\n")
    server.flush()
    return json.loads(server.readline())


@functools.cache
def fork_server(at_import: frozenset[tuple[str, str]] = frozenset()) -> TextIO:
    """Returns the connection to the fork server with these environment variables; starts it at the first call.

    The workers of pytest-xdist share it. It ends when all that are connected have ended.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    key = hashlib.sha256(repr((run, sorted(at_import))).encode()).hexdigest()[:16]
    address = Path(tempfile.gettempdir(), f"fork-server-{key}")
    with FileLock(f"{address}.lock"):
        if not address.exists():
            command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), address]
            environment, nothing = {**os.environ, **dict(at_import)}, subprocess.DEVNULL
            servers.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdin=nothing, stdout=nothing)
            )
            wait_for(address.exists, SECONDS)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(address))
    return connection.makefile("rw")


def allow_fsdp_on_cpus() -> None:
    """Makes Accelerate shard over gloo in this process, which it offers for GPUs only."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])
