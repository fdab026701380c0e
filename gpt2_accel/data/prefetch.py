"""Reads the next micro-batches in a background thread while the device computes."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch

from gpt2_accel.data.loader import Batch, TrainLoader
from gpt2_accel.data.threads import in_order
from gpt2_accel.optim import BatchSchedule
from gpt2_accel.runtime.device import to_device

AHEAD = 2  # micro-batches: one is ready, and one is being read


class Prefetch(AbstractContextManager, Iterator[Batch]):
    """Iterates over `batches`, whose next `AHEAD` a thread reads, and moves each to `device`. A context manager.

    The order is that of `batches`. The thread only reads: it never touches a device. An error in it is raised in place of
    its batch. Leaving the context drops what was read ahead and ends the thread.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device):
        self._device, source = device, iter(batches)
        self._read = in_order(lambda _: next(source, None), itertools.count(), 1, AHEAD)

    def __exit__(self, *_) -> None:
        self._read.close()

    def __next__(self) -> Batch:
        batch = next(self._read)
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
        first, size = schedule.first, schedule.sequences
        self._firsts = map(first, steps)
        super().__init__((b for step in steps for b in loader.update(first(step), size)), device)

    def update(self, first: int, sequences: int) -> Iterator[Batch]:
        """Returns what `TrainLoader.update` yields."""
        assert first == next(self._firsts), first
        return itertools.islice(self, self.micro_batches(sequences))
