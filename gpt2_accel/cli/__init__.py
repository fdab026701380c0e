"""The command line: runs a recipe's `main` with one-sentence errors, the console command, `doctor`."""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gpt2_accel.files import sentence

PACKAGE = Path(__file__).resolve().parent.parent
FIRST = 4  # local rank r > 0 waits FIRST + r seconds, so that a lower rank fails first


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ValueError` instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def run(main: Callable[[], object]) -> None:
    """Calls `main`. A user error ends the process with one sentence and exit code 1.

    User errors are `OSError`, and `ValueError` or `ImportError` raised by this package or by a script in the folder of
    the recipe. Other errors are bugs and keep their traceback. Only one of several processes prints. Ctrl-C ends with
    exit code 130.
    """
    try:
        main()
    except Exception as error:
        wait_for_turn()
        if not is_mistake(error):
            raise
        name = script().name.replace("__main__.py", "gpt2-accel")  # of `python -m gpt2_accel`
        end(f"{name}: {sentence(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def is_mistake(error: Exception) -> bool:
    """Whether the user can correct an error, judged by its type and by where it was raised."""
    if isinstance(error, OSError):
        return True
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    ours = PACKAGE in raised_in.parents or (raised_in.parent == script().parent)
    return ours and isinstance(error, (ValueError, ImportError))


def wait_for_turn() -> None:
    """Lets the processes of this machine with a lower rank fail first.

    The launcher terminates the others when one fails; they then exit silently.
    """
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(FIRST + int(rank))


def end(message: str) -> NoReturn:
    """Exits with code 1 and prints the message to stderr.

    torchrun and Accelerate's multi-process launcher print a long report of a failure. They get the message through
    torchrun's error file and print it at the end of the report.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": f"\n{message}", "timestamp": int(time.time())}
        Path(path).write_text(json.dumps(failure), encoding="utf-8")
        sys.exit(1)
    sys.exit(message)


def script() -> Path:
    """Returns the path of the script that was started."""
    return Path(sys.argv[0]).resolve()
