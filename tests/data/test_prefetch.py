"""Batches that a thread reads ahead: the order, errors, the end of the thread, and the overlap with training."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from conftest import losses, run

import gpt2_accel.data.loader as loader_module
from gpt2_accel.data.prefetch import AHEAD, Prefetch

CPU = torch.device("cpu")


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def batch(number):
    return torch.full((1,), number), torch.full((1,), number)


def test_order_is_kept_and_at_most_ahead_batches_are_read_before_they_are_asked_for():
    started = []

    def read():
        for number in range(20):
            started.append(number)
            yield batch(number)

    with Prefetch(read(), CPU) as batches:
        for number, (input_ids, _) in enumerate(batches):
            assert input_ids.item() == number
            deadline = time.monotonic() + 10
            while len(started) < min(20, number + 1 + AHEAD) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert len(started) == min(20, number + 1 + AHEAD)
    assert number == 19 and not threads()


def test_error_of_the_thread_is_raised_in_place_of_its_batch():
    def read():
        yield batch(0)
        raise ValueError("shard 7 is damaged")

    with Prefetch(read(), CPU) as batches:
        assert next(batches)[0].item() == 0
        with pytest.raises(ValueError, match="shard 7 is damaged"):
            next(batches)
    assert not threads()


class FakeCuda:
    """CUDA's current device of each thread, which a stream changes as `torch.cuda.stream` does."""

    def __init__(self):
        self.here, self.used = threading.local(), []

    def set_device(self, device):
        if torch.device(device).index is None:
            raise ValueError(f"expected a device with an index, got {device}")  # as torch does
        self.here.device = torch.device(device).index

    def current(self):
        return getattr(self.here, "device", 0)

    @contextmanager
    def stream(self, stream):
        before = self.current()
        self.set_device(stream.device)
        self.used.append(self.current())
        yield
        self.set_device(torch.device("cuda", before))
        self.used.append(self.current())


@pytest.mark.parametrize("device", ["cuda:3", "cuda"])
def test_the_thread_of_rank_3_never_uses_gpu_0(device, monkeypatch):
    """Leaving a stream sets the thread's former device, where CUDA then opens a context. With one process Accelerate's
    device has no index."""
    cuda, device = FakeCuda(), torch.device(device)
    index = torch.device("cuda", device.index or 0)  # a stream's device has one
    event = SimpleNamespace(record_event=lambda: None, wait_event=lambda _: None, device=index)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: event)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "set_device", cuda.set_device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    with Prefetch((batch(number) for number in range(4)), device) as batches:
        assert len(list(batches)) == 4
    assert set(cuda.used) == {index.index}


def test_thread_ends_with_the_loop_also_after_an_error(tiny, before_update):
    def failing(step):
        if step == 3:
            assert threads()
            raise KeyboardInterrupt

    before_update(failing)
    with pytest.raises(KeyboardInterrupt):
        run(tiny())
    assert not threads()


def test_updates_overlap_with_the_reads_of_the_next_batches(tiny, monkeypatch, before_update):
    """Each read takes 10 ms. If an update takes longer, its batch was read before it began."""
    read, finished, waiting = loader_module.read_windows, [], []

    def slow_read(*args):
        time.sleep(0.01)
        finished.append(1)
        return read(*args)

    def slow_update(step):
        time.sleep(0.05)
        waiting.append(len(finished) < step + 1)

    expected = losses(run(tiny("plain", max_steps=20)))
    monkeypatch.setattr(loader_module, "read_windows", slow_read)
    before_update(slow_update)
    assert losses(run(tiny("slow", max_steps=20))) == expected
    assert len(waiting) == 20 and sum(waiting) <= 1
