"""Shows on stderr how much of a long task is done: a bar in a terminal, lines in a pipe or file."""

import sys
from typing import Any

from tqdm import tqdm

PAUSE = 15.0  # seconds before the first line and between lines
DELAY = 1.0  # seconds before the bar appears
LINE = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Progress(tqdm):
    """A `tqdm` bar as wide as the terminal, which disappears at the end; lines without a terminal.

    `total` is None if unknown. Iteration yields the `items`. `options` go to `tqdm`.
    """

    def __init__(self, title: str, total: float | None, items: Any = None, **options: Any):
        shape: dict[str, Any] = {"leave": False, "delay": DELAY, "dynamic_ncols": True} | options
        if not sys.stderr.isatty():
            shape = {"leave": False, "delay": PAUSE, "mininterval": PAUSE, "miniters": 1} | options
            shape |= {"file": Lines(), "bar_format": LINE}
        super().__init__(items, title, total, **shape)


class Lines:
    """The file of a `tqdm` bar without a terminal: prints each state of the bar on stderr."""

    def write(self, text: str) -> None:
        """Prints text that is not blank."""
        line = text.replace("\x1b[A", "").strip()  # of a bar below another
        if line:
            print(line, file=sys.stderr, flush=True)
