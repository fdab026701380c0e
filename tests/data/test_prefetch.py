"""Batches that a thread reads ahead: the order, errors, the end of the thread, and the overlap with training."""

import threading
import time
from contextlib import nullcontext
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


@pytest.mark.parametrize(("given", "index"), [("cuda:3", 3), ("cuda", 0)])
def test_the_thread_of_rank_3_never_uses_gpu_0(given, index, monkeypatch):
    """A thread begins on GPU 0. With one process Accelerate's device has no index, which `set_device` needs."""
    chosen, device = [], torch.device("cuda", index)
    stream = SimpleNamespace(record_event=lambda: None, wait_event=lambda _: None, device=device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext(chosen.append("stream")))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    with Prefetch((batch(number) for number in range(4)), torch.device(given)) as batches:
        assert len(list(batches)) == 4
    assert chosen[:2] == [device, "stream"]


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
