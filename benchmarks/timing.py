"""Measures time and peak memory for the benchmarks."""

import sys
import time
from collections.abc import Callable

import torch


def this_device() -> torch.device:
    """Returns the accelerator of this machine, or its CPU without one."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Waits until `device` has finished all its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a call of `run`, which include the work of `device`."""
    synchronize(device)
    begun = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begun


def seconds_each(
    run: Callable[[], object], device: torch.device, *, warmup: int = 1, repeats: int = 5
) -> list[float]:
    """Returns the seconds of `repeats` calls of `run`, after `warmup` calls."""
    return [seconds_of(run, device) for _ in range(warmup + repeats)][warmup:]


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory so far in bytes.

    On CUDA it is that of tensors on `device` (`max_memory_allocated`), otherwise the resident memory of this process
    (`ru_maxrss`; not on Windows). On Linux a process inherits the `ru_maxrss` of its parent, so the parent should be
    small.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
