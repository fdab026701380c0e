"""Shows on stderr how much of a long task is done: a bar in a terminal, lines in a pipe or file."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

PAUSE = 15.0  # minimum seconds between lines; a shorter task prints none
DELAY = 1.0  # seconds before the bar appears

Item = TypeVar("Item")


class Progress:
    """The progress of a task of `total` units, unknown if None; a context manager. At its end the bar disappears.

    `options` are those of `tqdm.format_meter`, such as `unit`. Shows nothing if `shown` is False.
    """

    def __init__(self, what: str, total: float | None, *, shown: bool = True, **options: Any):
        self._lines = shown and not sys.stderr.isatty()
        self._meter = {"total": total, "prefix": what, **options}
        self._bar = tqdm(
            total=total,
            desc=what,
            leave=False,
            delay=DELAY,
            dynamic_ncols=True,
            disable=self._lines or not shown,
            **options,
        )
        self._done, self._start = 0, time.monotonic()
        self._next_line = self._start + PAUSE

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def expect(self, total: float) -> None:
        """Sets the number of units of the task."""
        self._bar.total = self._meter["total"] = total

    def advance(self, count: float = 1, note: str = "") -> None:
        """Notes that `count` more units are done; `note` stands behind them."""
        self._done += count
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(count)
        now = time.monotonic()
        if self._lines and now >= self._next_line:
            self._next_line = now + PAUSE
            meter = {"n": self._done, "elapsed": now - self._start, "postfix": note, "ncols": 100}
            print(tqdm.format_meter(**meter, **self._meter), file=sys.stderr, flush=True)


def progress(items: Iterable[Item], what: str, total: int, *, shown: bool = True) -> Iterator[Item]:
    """Yields `total` items and shows the progress of what is done with them."""
    with Progress(what, total, shown=shown) as bar:
        for item in items:
            yield item
            bar.advance()
