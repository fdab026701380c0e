"""The command line: runs a recipe's `main` with one-sentence errors, the console command."""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from gpt2_accel.runtime import signals
from gpt2_accel.runtime.files import sentence

signals.die_with_launcher()  # now: the imports of a recipe take seconds

PACKAGE = Path(__file__).resolve().parent.parent
CONNECTION = timedelta(seconds=5)  # time limit of a connection to the launcher's store


def run(main: Callable[[], object]) -> None:
    """Calls `main`. A user error ends the process with one sentence and exit code 1.

    User errors are `OSError`, and `ValueError` or `ImportError` raised by this package or by a script in the folder of
    the recipe. Other errors are bugs and keep their traceback. Of several processes only the first that fails prints.
    Ctrl-C ends with exit code 130, a run that a signal stopped with `signals.exit_code`.
    """
    try:
        main()
    except Exception as error:
        if not fails_first():
            sys.stdout.flush()
            os._exit(0)  # the launcher has the exit code of the first, and ends the rest
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            ErrorHandler().record_exception(error)  # the launcher's report ends with it
        if not is_mistake(error):
            raise
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


def fails_first() -> bool:
    """Whether this process is the first of its launcher's to fail, by a count in torchrun's store; True without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher = f"{os.environ.get('GROUP_RANK')}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    try:
        store = TCPStore(host, port, is_master=False, timeout=CONNECTION)
        return store.add(f"gpt2_accel/failed/{launcher}", 1) == 1
    except RuntimeError:  # the launcher that held the store has ended
        return True


def script() -> Path:
    """Returns the path of the script that was started."""
    return Path(sys.argv[0]).resolve()
