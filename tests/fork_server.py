"""Runs Python scripts in processes forked from this one, which has imported their libraries.

`fork_server.py ADDRESS` reads requests from a Unix socket, one JSON object per line, and answers
each with a JSON list. A request with `argv` starts a script once for each environment of `envs`, in
the folder `cwd`, with the files `output` and `errors`; the answer is the process ids. A request
`{"poll": [process id, …]}` asks for their exit codes, null while they run.
"""

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress

import datasets  # noqa: F401
import torch._dynamo  # noqa: F401  for compiled runs
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline  # noqa: F401

import gpt2_accel.data.prepare
import gpt2_accel.tools.study.compare
import gpt2_accel.train  # noqa: F401

with suppress(ImportError):  # the extra [report]
    import matplotlib.pyplot  # noqa: F401

codes: dict[int, int | None] = {}  # process id -> exit code, None while it runs


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


def start(request: dict, env: dict[str, str]) -> int:
    """Forks a child that runs the script in `env`; returns its process id."""
    child = os.fork()
    if child > 0:
        codes[child] = None
        return child
    os.setsid()  # so that a signal to its process group also ends its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(request["cwd"])
    for number, path in ((0, os.devnull), (1, request["output"]), (2, request["errors"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), number)
    code = run_script(request["argv"], env)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def poll(child: int) -> int | None:
    """Returns the exit code of a child; None while it runs."""
    if codes[child] is None:
        done, status = os.waitpid(child, os.WNOHANG)
        codes[child] = os.waitstatus_to_exitcode(status) if done else None
    return codes[child]


def answer(request: dict) -> list[int | None]:
    """Returns the exit codes that a request asks for, or the process ids that it starts."""
    if "poll" in request:
        return [poll(child) for child in request["poll"]]
    return [start(request, env) for env in request["envs"]]


def serve(address: str) -> None:
    """Answers requests at a Unix socket until no client is left."""
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        server.bind(f"{address}.new")
        server.listen()
        os.rename(f"{address}.new", address)
        selector.register(server, selectors.EVENT_READ)
        connected = True
        while connected:
            for key, _ in selector.select():
                if key.fileobj is server:
                    client, _ = server.accept()
                    selector.register(client, selectors.EVENT_READ, client.makefile("rw"))
                    continue
                line = key.data.readline()
                if line:
                    key.data.write(json.dumps(answer(json.loads(line))) + "\n")
                    key.data.flush()
                else:
                    selector.unregister(key.fileobj)
            connected = len(selector.get_map()) > 1
    os.unlink(address)
    with suppress(FileNotFoundError):
        os.unlink(f"{address}.lock")


if __name__ == "__main__":
    # A signal that ends the tests does not end this process, which then ends what they started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()  # imported objects are never collected, so children keep sharing their memory
    serve(sys.argv[1])
    for child, code in codes.items():
        if code is None:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
