"""How a recipe's `main` is run from a shell."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def run(main: Callable[[], object]) -> None:
    """Calls `main`. A mistake of the user's ends it with one sentence and exit code 1.

    Such a mistake is a `ValueError` or `OSError`, or an `ImportError` where an extra is missing, raised by
    this package or by a script of the same folder; all else is a bug or another library's affair, and keeps
    its traceback. Ctrl-C ends with exit code 130.
    """
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        package, script = Path(__file__).resolve().parent, Path(sys.argv[0]).resolve()
        if package not in raised_in.parents and raised_in.parent != script.parent:
            raise
        sys.exit(f"{script.name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
