"""Runs Python scripts in processes forked from this one, which has imported their libraries.

Reads requests from stdin, one JSON object per line, `{"commands": [{"argv": […], "env": {…}}, …], "cwd": …, "output":
…, "errors": …, "timeout": seconds}`, starts all commands of a request together, and answers with their exit codes, one
JSON list per line. If one command fails the others are ended, as by torchrun. Without a timeout the answer is their
process ids, immediately; a later `{"poll": [process id, …]}` asks for their exit codes, null while they run.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress

import datasets  # noqa: F401
import torch._dynamo  # noqa: F401  for compiled runs
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline  # noqa: F401

import gpt2_accel.data.prepare
import gpt2_accel.evals.harness
import gpt2_accel.study.outcome
import gpt2_accel.train  # noqa: F401

with suppress(ImportError):  # the extra [report]
    import matplotlib.pyplot  # noqa: F401

GRACE = 10  # seconds in which the others must end after one command failed
running: set[int] = set()  # children started without a timeout
ended: dict[int, int] = {}


def run_script(argv: list[str], env: dict[str, str]) -> int:
    """Runs a script as `python argv` would; returns its exit code."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(command: dict, request: dict) -> int:
    """Forks a child that runs one command; returns its process id."""
    if (child := os.fork()) > 0:
        return child
    os.setsid()  # so that `kill` also ends its children
    os.chdir(request["cwd"])
    for number, path in ((0, os.devnull), (1, request["output"]), (2, request["errors"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), number)
    code = run_script(command["argv"], command["env"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end(others: list[int]) -> None:
    """Sends SIGTERM to processes, as torchrun does when one has failed."""
    for child in others:
        os.kill(child, signal.SIGTERM)


def kill(child: int) -> None:
    """Kills a child and its descendants."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)


def poll(child: int) -> int | None:
    """Returns the exit code of a child; None while it runs."""
    if child in running:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            return None
        running.remove(child)
        ended[child] = os.waitstatus_to_exitcode(status)
    return ended[child]


def answer(request: dict) -> list[int | None]:
    """Returns the exit codes of a request's commands, or their process ids."""
    if "poll" in request:
        return [poll(child) for child in request["poll"]]
    children = [start(command, request) for command in request["commands"]]
    if "timeout" not in request:
        running.update(children)
        return children
    codes: dict[int, int] = {}
    failed = False
    deadline = time.monotonic() + request["timeout"]
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child] and not failed:
                        failed = True
                        deadline = min(deadline, time.monotonic() + GRACE)
                        end([child for child in children if child not in codes])
        if time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    kill(child)
                    codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.01)
    return [codes[child] for child in children]


if __name__ == "__main__":
    gc.freeze()  # imported objects are never collected, so children keep sharing their memory
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
    for child in running:
        kill(child)
