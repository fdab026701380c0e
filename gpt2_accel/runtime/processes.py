"""What the processes of a run decide together: the main process decides, the others are told."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from torch.distributed import DistError

# For what the main process prepares; a process that dies ends the launch.
LONGEST_WAIT = timedelta(days=2)

# What gloo says where NCCL has an error of its own.
GLOO = "gloo/transport"

Result = TypeVar("Result")
_numbers = itertools.count()


def processes() -> PartialState:
    """Accelerate's view of the processes, for what a recipe does before it trains. `PartialState()` alone would not see
    those of a CPU."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


@contextmanager
def main_process_first() -> Iterator[None]:
    """The main process runs the block first, the others after it, however long it takes.

    They wait at the launch's key-value store: NCCL would end a collective after ten minutes. Raises `OSError` on the
    others if the block fails on the main process.
    """
    state = processes()
    if state.num_processes == 1:
        yield
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"main_process_first/{next(_numbers)}"
    if not state.is_main_process:
        store.wait([key], LONGEST_WAIT)
        if problem := store.get(key).decode():
            raise OSError(f"the main process failed: {problem}")
        yield
        return
    problem = ""
    try:
        yield
    except BaseException as error:
        problem = str(error) or type(error).__name__
        raise
    finally:
        store.set(key, problem)


def on_main_process(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """What `function` returns on the main process, which alone calls it, on all processes.

    The others wait however long it takes. The `ValueError` or `OSError` that it raises is raised on all of them.
    """
    outcome: list = [None, None]
    with main_process_first():
        if accelerator.is_main_process:
            try:
                outcome[0] = function()
            except (ValueError, OSError) as error:
                outcome[1] = plain(error)
    result, error = broadcast_object_list(outcome)
    if error is not None:
        raise error
    return result


@contextmanager
def all_or_none(accelerator: Accelerator) -> Iterator[None]:
    """A block without communication that all processes run; if it fails on one, it raises that error on all.

    Otherwise the others would wait for the one that failed, in their next exchange.
    """
    mine: BaseException | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        mine = error
    found = gather_object([mine and plain(mine)])
    if mine is not None:
        raise mine
    if error := next(filter(None, found), None):
        raise error


def lost_another(error: BaseException) -> bool:
    """Whether an exchange failed because another process is gone."""
    return isinstance(error, DistError) or GLOO in str(error)


def plain(error: Exception) -> Exception:
    """The error as one that can be sent to another process."""
    kinds = (FileNotFoundError, FileExistsError, OSError, ValueError)
    return next(kind for kind in kinds if isinstance(error, kind))(str(error))
