"""Calls a function for items in threads, ahead of need."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def in_order(
    function: Callable[[Any], Any], items: Iterable[Any], workers: int, ahead: int
) -> Generator[Any]:
    """Yields the results of `function` for the items, in their order, from `workers` threads.

    At most `ahead` results are computed before they are requested. An error is raised in place of
    its result. The threads end with the iteration, also if that is closed early.
    """
    upcoming: deque[Future] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="in_order")
    try:
        for item in items:
            upcoming.append(pool.submit(function, item))
            if len(upcoming) > ahead:
                yield upcoming.popleft().result()
        for future in upcoming:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
