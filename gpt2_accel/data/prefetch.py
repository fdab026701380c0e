"""Reads the next micro-batches in a background thread while the device computes."""

import itertools
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing

import torch

from gpt2_accel.batch_size import BatchSchedule
from gpt2_accel.data.loader import Batch, TrainLoader
from gpt2_accel.data.threads import in_order
from gpt2_accel.runtime.device import to_device

BATCHES_AHEAD = 2  # micro-batches: one is ready, and one is being read


def prefetch(batches: Iterable[Batch], device: torch.device) -> Generator[Batch]:
    """Yields `batches` in their order, moved to `device`; a thread reads the next `BATCHES_AHEAD`.

    The thread only reads: it never touches a device. An error in it is raised in place of its
    batch. `close` drops the batches that were read ahead and ends the thread.
    """
    source = iter(batches)
    reads = in_order(lambda _: next(source, None), itertools.count(), 1, BATCHES_AHEAD)
    with closing(reads):
        for batch in reads:
            if batch is None:
                return
            moved = {
                name: to_device(part, device)
                for name, part in batch._asdict().items()
                if isinstance(part, torch.Tensor)
            }
            yield batch._replace(**moved)


class PrefetchLoader(AbstractContextManager):
    """The micro-batches of the updates `steps` of a `schedule`, read ahead also across updates.

    A context manager. It takes the place of `loader` in the training loop, which asks for these
    updates in order. `waited` are the seconds in which the loop has waited for it.
    """

    waited = 0.0

    def __init__(
        self, loader: TrainLoader, schedule: BatchSchedule, steps: range, device: torch.device
    ):
        self.micro_batches = loader.micro_batches
        first = schedule.first
        size = schedule.sequences
        self._firsts = map(first, steps)
        batches = (batch for step in steps for batch in loader.update(first(step), size(step)))
        self._batches = prefetch(batches, device)

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def update(self, first: int, sequences: int) -> tuple[Iterator[Batch], int]:
        """Returns the micro-batches of `TrainLoader.update`, and their number."""
        assert first == next(self._firsts), first
        count = self.micro_batches(sequences)
        return self._timed(count), count

    def _timed(self, count: int) -> Iterator[Batch]:
        for _ in range(count):
            start = time.perf_counter()
            batch = next(self._batches)
            self.waited += time.perf_counter() - start
            yield batch
