"""How a recipe's `main` is run from a shell."""

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

from gpt2_accel.errors import sentence

FIRST = 4  # seconds that the first process of a machine has before the others; each of them has one more


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a `ValueError` of one sentence, without pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def run(main: Callable[[], object]) -> None:
    """Calls `main`. A mistake of the user's ends it with one sentence and exit code 1.

    Such a mistake is an `OSError`, or a `ValueError` or `ImportError` raised by this package or by a script of the same
    folder; all else is a bug or another library's affair, and keeps its traceback. Of several processes one speaks.
    Ctrl-C ends with exit code 130.
    """
    try:
        main()
    except Exception as error:
        wait_for_turn()
        if not is_mistake(error):
            raise
        end(f"{script().name}: {sentence(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def is_mistake(error: Exception) -> bool:
    """Whether an error is the user's to correct, by its kind and by who raised it."""
    if isinstance(error, OSError):
        return True
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    ours = Path(__file__).resolve().parent in raised_in.parents or (
        raised_in.parent == script().parent
    )
    return ours and isinstance(error, (ValueError, ImportError))


def wait_for_turn() -> None:
    """Gives the processes of this machine that come before this one the time to fail first.

    The launcher ends the others when one has failed; this one then ends without a word.
    """
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(FIRST + int(rank))


def end(message: str) -> NoReturn:
    """Ends this process with exit code 1 and the message on stderr.

    torchrun, and Accelerate's launcher of several processes, report a failure at length: they get the message to print
    at the end of their report, and it is nowhere else.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": f"\n{message}", "timestamp": int(time.time())}
        Path(path).write_text(json.dumps(failure), encoding="utf-8")
        sys.exit(1)
    sys.exit(message)


def script() -> Path:
    """The script that was started."""
    return Path(sys.argv[0]).resolve()
