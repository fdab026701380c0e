"""Coordinates the processes of a run: the main process first, then its result or error to all."""

import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env

from gpt2_accel.data.shards import UnreadableData
from gpt2_accel.runtime.device import end_of_work
from gpt2_accel.runtime.files import sentence
from gpt2_accel.runtime.signals import launched

# The others wait this long for the main process. If it dies, the launcher ends them.
LONGEST_WAIT = timedelta(days=2)

Result = TypeVar("Result")
_numbers = itertools.count()
_stores: list[torch.distributed.Store] = []  # that of the process group, also if a run has ended it


def process_state() -> PartialState:
    """Returns Accelerate's `PartialState`, for a recipe's work before training.

    `PartialState()` without arguments does not see the processes of a CPU launch. Raises
    `ValueError` if Accelerate does not see all started processes: each would train alone. Also for
    variables of a launch, such as `LOCAL_RANK`, that are set without one.
    """
    names = [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE", "PMI_SIZE"))]
    started = os.environ.get("WORLD_SIZE", "1")
    try:
        state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    except Exception as error:  # the libraries raise several types
        if launched():
            raise
        raise ValueError(
            f"no launcher started this process, but {', '.join(names)} in the environment asks for "
            f"several: unset it, or take accelerate launch ({sentence(error)})"
        ) from error
    if started != str(state.num_processes):
        raise ValueError(
            f"WORLD_SIZE is {started}, but Accelerate has num_processes {state.num_processes}: "
            "without GPUs take the launch config cpu.yaml, or for several processes on a CPU put "
            "ACCELERATE_USE_CPU=true before the command"
        )
    if _stores and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            state.backend,
            store=torch.distributed.PrefixStore("next", _stores[0]),  # the old keys stay
            rank=state.process_index,
            world_size=state.num_processes,
        )
    return state


@contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the block on the main process first, then on the others.

    All ranks call it equally often. The others wait at the launch's key-value store, since an NCCL
    collective times out after ten minutes. If the block fails on the main process, they wait until
    the launcher ends them.
    """
    state = process_state()
    if state.num_processes == 1:
        yield
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    _stores[:] = [store]
    key = f"main_process_first/{next(_numbers)}"
    if not state.is_main_process:
        store.wait([key], LONGEST_WAIT)
    yield
    if state.is_main_process:
        store.set(key, "done")


def on_main_process(function: Callable[[], Result]) -> Result:
    """Calls `function` on the main process only and broadcasts its result.

    The others wait without a time limit. An error of `function` is raised on all processes.
    """
    result: list = [None]
    failure: Exception | None = None
    with main_process_first():
        if process_state().is_main_process:
            try:
                result[0] = function()
            except Exception as error:
                failure = error
    with all_or_none():
        if failure is not None:
            raise failure
    return broadcast_object_list(result)[0]


@contextmanager
def all_or_none() -> Iterator[None]:
    """Runs a block without collectives on all processes; an error on one is raised on all.

    Otherwise the others would wait for the failed process in their next collective.
    """
    mine: list[Exception] = []
    try:
        yield
    except Exception as error:
        mine = [error]
    failures = gather_object([picklable(error) for error in mine])
    if failures:
        raise (mine + failures)[0]


def any_rank(accelerator: Accelerator, flag: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that reports whether `flag()` is true on any rank.

    All ranks call it equally often. With several processes, or on a GPU, it returns the answer of
    the previous call: the host waits until the device has done the work queued before that call,
    not later work.
    """
    if accelerator.num_processes == 1 and accelerator.device.type == "cpu":
        return flag
    count = torch.zeros(())
    copied = None

    def answer() -> bool:
        nonlocal count, copied
        previous = count
        end = copied
        raised = torch.full((), float(flag()), device=accelerator.device)
        count = accelerator.reduce(raised, "sum").to("cpu", non_blocking=True)
        copied = end_of_work(accelerator.device)
        if end is not None:
            end.synchronize()
        return previous.item() > 0

    return answer


def picklable(error: Exception) -> Exception:
    """Converts an error to a built-in type that can be pickled and broadcast.

    A bug becomes a `RuntimeError` with its traceback.
    """
    for kind in (UnreadableData, OSError, ValueError):
        if isinstance(error, kind):
            return kind(sentence(error))
    return RuntimeError("".join(traceback.format_exception(error)))
