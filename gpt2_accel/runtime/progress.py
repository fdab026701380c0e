"""Shows on stderr how much of a long task is done: a bar in a terminal, lines in a pipe or file."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

PAUSE = 15.0  # seconds before the first line and between lines
DELAY = 1.0  # seconds before the bar appears
LINE = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

Item = TypeVar("Item")


class Progress(tqdm):
    """A `tqdm` bar that follows the terminal's width and disappears at the end of the task, or lines without a terminal.

    `total` is None if unknown. `options` are those of `tqdm`. Shows nothing if `shown` is False.
    """

    def __init__(self, what: str, total: float | None, *, shown: bool = True, **options: Any):
        if sys.stderr.isatty():
            shape: dict[str, Any] = {"delay": DELAY, "dynamic_ncols": True}
        else:
            shape = {"delay": PAUSE, "mininterval": PAUSE, "miniters": 1}
            shape |= {"file": Lines(), "bar_format": LINE}
        super().__init__(
            desc=what, total=total, disable=not shown, **{"leave": False, **shape, **options}
        )


class Lines:
    """The file that a `tqdm` bar writes to without a terminal: prints each state of the bar as a line on stderr."""

    def write(self, text: str) -> None:
        """Prints what is not blank."""
        line = text.strip()
        if line:
            print(line, file=sys.stderr, flush=True)


def progress(items: Iterable[Item], what: str, total: int, *, shown: bool = True) -> Iterable[Item]:
    """Yields the items, `total` of them, and shows the progress of what is done with them."""
    return Progress(what, total, shown=shown, iterable=items)
