"""The command line: runs a recipe's `main` with one-sentence errors, the console command."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from signal import SIG_DFL, SIGINT, default_int_handler, getsignal, signal

from gpt2_accel.runtime import signals
from gpt2_accel.runtime.files import sentence
from gpt2_accel.runtime.recipe_command import PACKAGE

signals.die_with_launcher()  # now: the imports of a recipe take seconds

if getsignal(SIGINT) is default_int_handler:
    signal(SIGINT, SIG_DFL)  # until `run`, Ctrl-C prints no traceback of imports


def run(main: Callable[[], object]) -> None:
    """Calls `main`. A user error ends the process with one sentence and exit code 1.

    User errors are `OSError`, and `ValueError` or `ImportError` raised by this package or by a
    script in the folder of the recipe. Other errors are bugs and keep their traceback. Under
    torchrun only the first process of a machine prints its sentence, or with `gpt2-accel` the
    launcher itself; the launcher's report has the error of any process. Output that cannot be
    written ends nothing. Ctrl-C ends with exit code 130, a run that a signal stopped with
    `signals.exit_code`.
    """
    if getsignal(SIGINT) is SIG_DFL:
        signal(SIGINT, default_int_handler)
    try:
        with signals.lasting_output():
            main()
    except Exception as error:
        recorded = "TORCHELASTIC_ERROR_FILE" in os.environ
        mistake = is_mistake(error)
        if mistake:  # the report has one line
            error.__traceback__ = error.__cause__ = None
        if recorded:
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            ErrorHandler().record_exception(error)  # the launcher's report ends with the first
        if not mistake:
            raise
        if recorded and ("GPT2_ACCEL_REPORTS" in os.environ or not signals.is_first()):
            sys.exit(1)
        sys.exit(f"{script().name.replace('__main__.py', 'gpt2-accel')}: {sentence(error)}")
    except KeyboardInterrupt:
        sys.exit(130)
    if signals.exit_code:
        sys.exit(signals.exit_code)


def is_mistake(error: Exception) -> bool:
    """Whether the user can correct an error, judged by its type and by where it was raised."""
    if isinstance(error, OSError):
        return True
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    ours = PACKAGE in raised_in.parents or (raised_in.parent == script().parent)
    return ours and isinstance(error, (ValueError, ImportError))


def script() -> Path:
    """Returns the path of the script that was started."""
    return Path(sys.argv[0]).resolve()
