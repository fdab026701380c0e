"""Reads the next micro-batches in a background thread while the device computes."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial

import torch

from gpt2_accel.data.loader import Batch, TrainLoader
from gpt2_accel.device import SideStream
from gpt2_accel.optim import BatchSchedule

AHEAD = 2  # micro-batches: one is ready, and one is being read or copied


class Prefetch(AbstractContextManager, Iterator[Batch]):
    """Iterates over `batches` on `device`, whose next `AHEAD` a thread reads. A context manager.

    The order is that of `batches`. On a CUDA device the thread copies them on a stream of its own. An error in the
    thread is raised in place of its batch. Leaving the context drops what was read ahead and ends the thread.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device):
        self._batches, self._stream = iter(batches), SideStream(device)
        self._upcoming: deque[Future] = deque()
        start = self._stream.start_thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=start)

    def __exit__(self, *_) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __next__(self) -> Batch:
        while len(self._upcoming) <= AHEAD:
            read = partial(next, self._batches, None)
            self._upcoming.append(self._thread.submit(self._stream.run, read))
        batch, copied = self._upcoming.popleft().result()
        if batch is None:
            raise StopIteration
        self._stream.hand_over(batch, copied)
        return batch


class PrefetchLoader(Prefetch):
    """The micro-batches of the updates `steps` of a `schedule`, read ahead also across updates. A context manager.

    It takes the place of `loader` in the training loop, which asks for these updates in order.
    """

    def __init__(self, loader: TrainLoader, schedule: BatchSchedule, steps: range):
        self.micro_batches = loader.micro_batches
        self._schedule, self._steps = schedule, iter(steps)
        first, size = schedule.first, schedule.sequences
        batches = (batch for step in steps for batch in loader.update(first(step), size))
        super().__init__(batches, loader.device)

    def update(self, first: int, sequences: int) -> Iterator[Batch]:
        """Returns what `TrainLoader.update` yields."""
        assert first == self._schedule.first(next(self._steps)), first
        return itertools.islice(self, self.micro_batches(sequences)[1])
