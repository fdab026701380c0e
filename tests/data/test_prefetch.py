"""Batches that a thread reads ahead: order, errors, end of the thread, overlap with training."""

import threading
from contextlib import closing

import pytest
import torch
from conftest import run
from launching import wait_for

from gpt2_accel.data.loader import Batch
from gpt2_accel.data.prefetch import BATCHES_AHEAD, prefetch

CPU = torch.device("cpu")


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("in_order")]


def batch(number):
    return Batch(torch.full((1,), number), torch.full((1,), number), divisor=number)


def test_the_order_is_kept_and_few_batches_are_read_ahead():
    started = []

    def read():
        for number in range(20):
            started.append(number)
            yield batch(number)

    with closing(prefetch(read(), CPU)) as batches:
        for number, (input_ids, *_) in enumerate(batches):
            assert input_ids.item() == number
            ahead = min(20, number + 1 + BATCHES_AHEAD)
            wait_for(lambda ahead=ahead: len(started) >= ahead, 10)
            assert len(started) == ahead
    assert number == 19
    assert not threads()


def test_the_thread_never_touches_a_gpu(monkeypatch):
    """A new thread is on GPU 0, where each rank would open a context. The main thread copies."""
    callers = []

    def moved(tensor, *_, **__):
        callers.append(threading.current_thread())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", moved)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    numbers = map(batch, range(4))
    with closing(prefetch(numbers, torch.device("cuda:3"))) as batches:
        assert [each.divisor for each in batches] == list(range(4))
    assert set(callers) == {threading.main_thread()}
    assert len(callers) == 16


def test_the_thread_ends_with_the_loop_also_after_an_error(tiny, before_update):
    def failing(step):
        if step == 3:
            assert threads()
            raise KeyboardInterrupt

    before_update(failing)
    with pytest.raises(KeyboardInterrupt):
        run(tiny())
    assert not threads()
