"""Reads the next micro-batches in a background thread while the device computes."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from gpt2_accel.data.loader import Batch, TrainLoader
from gpt2_accel.device import to_device
from gpt2_accel.optim import BatchSchedule

AHEAD = 2  # micro-batches: one is ready, and one is being read


class Prefetch(AbstractContextManager, Iterator[Batch]):
    """Iterates over `batches`, whose next `AHEAD` a thread reads, and moves each to `device`. A context manager.

    The order is that of `batches`. The thread only reads: it never touches a device. An error in it is raised in place of
    its batch. Leaving the context drops what was read ahead and ends the thread.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device):
        self._batches, self._device = iter(batches), device
        self._upcoming: deque[Future] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def __exit__(self, *_) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __next__(self) -> Batch:
        while len(self._upcoming) <= AHEAD:
            self._upcoming.append(self._thread.submit(next, self._batches, None))
        batch = self._upcoming.popleft().result()
        if batch is None:
            raise StopIteration
        moved = [part if part is None else to_device(part, self._device) for part in batch[:3]]
        return Batch(*moved, batch.divisor)


class PrefetchLoader(Prefetch):
    """The micro-batches of the updates `steps` of a `schedule`, read ahead also across updates. A context manager.

    It takes the place of `loader` in the training loop, which asks for these updates in order.
    """

    def __init__(
        self, loader: TrainLoader, schedule: BatchSchedule, steps: range, device: torch.device
    ):
        self.micro_batches = loader.micro_batches
        self._schedule, self._steps = schedule, iter(steps)
        first, size = schedule.first, schedule.sequences
        batches = (batch for step in steps for batch in loader.update(first(step), size))
        super().__init__(batches, device)

    def update(self, first: int, sequences: int) -> Iterator[Batch]:
        """Returns what `TrainLoader.update` yields."""
        assert first == self._schedule.first(next(self._steps)), first
        return itertools.islice(self, self.micro_batches(sequences)[1])
