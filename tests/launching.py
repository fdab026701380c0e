"""Starts scripts as `accelerate launch` or `python` does, in forked processes.

Importing torch, transformers and accelerate takes seconds, and a launch does it once for the
launcher and once for each process. Forked processes get the environment that Accelerate's launcher
computes from its config and flags, and reduce gradients by gloo. `launcher=True` starts the real
launcher instead.
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
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from filelock import FileLock
from torch.distributed import TCPStore

ROOT = Path(__file__).parent.parent
SECONDS = 280  # time limit of one launch
GRACE = 10  # seconds in which the others must end after one process failed
# Flags of the launcher: in fp32 and not compiled.
EAGER = ("--mixed_precision", "no", "--dynamo_backend", "no")
KEPT: list[object] = []  # stores and fork servers, until this process ends


def launch(
    script: str,
    *args: object,
    processes: int = 1,
    config: str = "cpu",
    launcher: bool = False,
    fails: bool = False,
    **env: str,
) -> subprocess.CompletedProcess:
    """Runs `accelerate launch --config_file accelerate_configs/CONFIG.yaml SCRIPT ARGS` on CPUs.

    Flags of the launcher may precede the script's name. With several processes, the config "cpu"
    stands for the flags `--multi_gpu --num_processes`, as in the docs.
    """
    flags, environment = launch_flags(script, *args, processes=processes, config=config, **env)
    if launcher:
        command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        return ended(done, fails)
    return forked(*launched(flags, environment), fails=fails)


def sharded(script: str, *args: object, **env: str) -> subprocess.CompletedProcess:
    """Runs a script on two processes that FSDP2 shards, in fp32 and not compiled."""
    return launch(*EAGER, script, *args, processes=2, config="8xa100_fsdp2", FSDP="1", **env)


def ended(done: subprocess.CompletedProcess, fails: bool | None) -> subprocess.CompletedProcess:
    """Returns a process that has to succeed, or to fail; with `fails=None` either is right."""
    assert fails is None or bool(done.returncode) == fails, (
        f"{done.args}\n{done.stdout}\n{done.stderr}"
    )
    return done


def launch_flags(
    script: str | Path, *args: object, processes: int = 1, config: str = "cpu", **env: str
) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of `accelerate launch` and its environment."""
    flags = ["--config_file", str(ROOT / f"accelerate_configs/{config}.yaml")]
    if config == "cpu" and processes == 1:
        flags += ["--num_cpu_threads_per_process", os.environ["OMP_NUM_THREADS"]]
    else:
        if config == "cpu":
            flags = ["--multi_gpu"]
        flags += ["--num_processes", str(processes), "--main_process_port", free_port()]
        env = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | env
    return flags + [str(word) for word in (script, *args)], os.environ | env


def python(
    script: str | Path,
    *args: object,
    cwd: Path = ROOT,
    at_import: dict[str, str] | None = None,
    fails: bool | None = False,
    **env: str,
) -> subprocess.CompletedProcess:
    """Runs `python SCRIPT ARGS` in a forked process.

    `at_import` are the environment variables that libraries read at import.
    """
    at_import = at_import or {}
    environment = os.environ | at_import | env
    return forked([str(script), *map(str, args)], [environment], cwd, at_import, fails)


def in_process(
    script: str | Path, *args: object, fails: bool = False
) -> subprocess.CompletedProcess:
    """Runs `python SCRIPT ARGS` in this process."""
    argv = [str(script), *map(str, args)]
    output = io.StringIO()
    errors = io.StringIO()
    code: object = 0
    try:
        with patch.object(sys, "argv", argv), redirect_stdout(output), redirect_stderr(errors):
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        errors.write(code + "\n")
        code = 1
    done = subprocess.CompletedProcess(argv, code or 0, output.getvalue(), errors.getvalue())
    return ended(done, fails)


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    """Waits until a condition holds, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


class Forked:
    """A script in one forked process per environment, in parallel, as under torchrun."""

    def __init__(
        self,
        argv: list[str],
        environments: list[dict[str, str]],
        output: Path,
        errors: Path,
        cwd: Path = ROOT,
        at_import: dict[str, str] | None = None,
    ):
        if "TORCHELASTIC_USE_AGENT_STORE" in environments[0]:  # the store that torchrun holds
            port = int(environments[0]["MASTER_PORT"])
            KEPT.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        self.at_import = at_import
        files = {"cwd": str(cwd), "output": str(output), "errors": str(errors)}
        self.pids = ask({"argv": argv, "envs": environments} | files, at_import)

    def codes(self) -> list[int | None]:
        """Returns the exit code of each process, None while it runs."""
        return ask({"poll": self.pids}, self.at_import)

    def poll(self) -> int | None:
        """Returns None while a process runs, then the exit code."""
        codes = self.codes()
        return None if None in codes else exit_code(codes)

    def wait(self, seconds: float = SECONDS, end_others: bool = False) -> int:
        """Waits and returns the exit code. Kills the processes after `seconds`.

        With `end_others` the failure of one process ends the others, as by torchrun.
        """
        deadline = time.monotonic() + seconds
        codes = self.codes()
        while None in codes:
            if end_others and any(codes):
                end_others = False
                self.send_signal(signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL, os.killpg)
            time.sleep(0.005)
            codes = self.codes()
        return exit_code(codes)

    def send_signal(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        """Sends a signal to the running processes."""
        for pid, code in zip(self.pids, self.codes(), strict=True):
            if code is None:
                send(pid, number)


class Started(Forked):
    """A launch, or without `processes` a Python script, beside the test. It writes to `log`."""

    def __init__(
        self,
        script: str | Path,
        *args: object,
        log: Path,
        processes: int | None = None,
        config: str = "cpu",
        **env: str,
    ):
        argv, environments = [str(script), *map(str, args)], [os.environ | env]
        if processes:
            flags = launch_flags(*argv, processes=processes, config=config, **env)
            argv, environments = launched(*flags)
        super().__init__(argv, environments, log, log)


def launched(flags: list[str], environment: dict[str, str]) -> tuple[list[str], list[dict]]:
    """Returns the script's command line and the environment that each process gets."""
    with patch.dict(os.environ, environment), chdir(ROOT):
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(flags))
        several = args.multi_gpu or args.use_fsdp
        if several:
            variables = prepare_multi_gpu_env(args)
        else:
            _, variables = prepare_simple_launcher_cmd_env(args)
    argv = [args.training_script, *args.training_script_args]
    if not several:
        return argv, [variables]
    variables |= {
        "WORLD_SIZE": str(args.num_processes),
        "LOCAL_WORLD_SIZE": str(args.num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(args.main_process_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = map(str, range(args.num_processes))
    return argv, [variables | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def exit_code(codes: list[int]) -> int:
    """Returns the exit code of a launch: of a process that failed, rather than was killed."""
    return next((code for code in codes if code > 0), min(codes))


def forked(
    argv: list[str],
    environments: list[dict[str, str]],
    cwd: Path = ROOT,
    at_import: dict[str, str] | None = None,
    fails: bool | None = False,
) -> subprocess.CompletedProcess:
    """Runs a script in one forked process per environment, and waits for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        code = Forked(argv, environments, output, errors, cwd, at_import).wait(end_others=True)
        done = subprocess.CompletedProcess(argv, code, output.read_text(), errors.read_text())
    return ended(done, fails)


def ask(request: dict, at_import: dict[str, str] | None = None) -> list:
    """Sends a request to a fork server and returns its answer."""
    server = fork_server(frozenset((at_import or {}).items()))
    server.write(json.dumps(request) + "\n")
    server.flush()
    return json.loads(server.readline())


@functools.cache
def fork_server(at_import: frozenset[tuple[str, str]]) -> TextIO:
    """Returns the connection to the fork server with these variables, which it starts if needed.

    The workers of pytest-xdist share it. It ends when all that are connected have ended.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    key = hashlib.sha256(repr((run, sorted(at_import))).encode()).hexdigest()[:16]
    address = Path(tempfile.gettempdir(), f"fork-server-{key}")
    with FileLock(f"{address}.lock"):
        if not address.exists():
            command = [sys.executable, str(ROOT / "tests/fork_server.py"), address]
            env = os.environ | dict(at_import)
            nothing = subprocess.DEVNULL
            KEPT.append(subprocess.Popen(command, env=env, cwd=ROOT, stdin=nothing, stdout=nothing))
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
