"""Reads the next micro-batches in a background thread while the device computes."""

import itertools
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing

import torch

from gpt2_accel.data.loader import Batch, TrainLoader
from gpt2_accel.data.threads import in_order
from gpt2_accel.optim import BatchSchedule
from gpt2_accel.runtime.device import to_device

BATCHES_AHEAD = 2  # micro-batches: one is ready, and one is being read


def prefetch(batches: Iterable[Batch], device: torch.device) -> Generator[Batch]:
    """Yields `batches`, whose next `BATCHES_AHEAD` a thread reads, each moved to `device`.

    The order is that of `batches`. The thread only reads: it never touches a device. An error in it is raised in place of
    its batch. `close` drops what was read ahead and ends the thread.
    """
    source = iter(batches)
    with closing(
        in_order(lambda _: next(source, None), itertools.count(), 1, BATCHES_AHEAD)
    ) as found:
        for batch in found:
            if batch is None:
                return
            own = {n: p for n, p in batch._asdict().items() if isinstance(p, torch.Tensor)}
            yield batch._replace(**{name: to_device(part, device) for name, part in own.items()})


class PrefetchLoader(AbstractContextManager):
    """The micro-batches of the updates `steps` of a `schedule`, read ahead also across updates. A context manager.

    It takes the place of `loader` in the training loop, which asks for these updates in order.
    """

    def __init__(
        self, loader: TrainLoader, schedule: BatchSchedule, steps: range, device: torch.device
    ):
        self.micro_batches = loader.micro_batches
        first = schedule.first
        size = schedule.sequences
        self._firsts = map(first, steps)
        batches = (batch for step in steps for batch in loader.update(first(step), size(step)))
        self._batches = prefetch(batches, device)

    def __exit__(self, *_) -> None:
        self._batches.close()

    def update(self, first: int, sequences: int) -> Iterator[Batch]:
        """Returns what `TrainLoader.update` yields."""
        assert first == next(self._firsts), first
        return itertools.islice(self._batches, self.micro_batches(sequences))
