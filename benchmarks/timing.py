"""What the benchmarks measure with: time, memory, and how fast the device multiplies matrices."""

import sys
import time
from collections.abc import Callable

import torch


def this_device() -> torch.device:
    """The accelerator of this machine, its CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Waits until `device` has done all that was asked of it; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_each(
    run: Callable[[], object], device: torch.device, *, warmup: int = 1, repeats: int = 5
) -> list[float]:
    """How many seconds `run` takes, `repeats` times, each up to where `device` is done; `warmup` calls before
    them do not count."""
    seconds = []
    for _ in range(warmup + repeats):
        synchronize(device)
        begun = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return seconds[warmup:]


def peak_memory(device: torch.device) -> int:
    """The most memory so far in bytes: on CUDA that of tensors on `device` (`max_memory_allocated`),
    elsewhere what this process has held of the machine's (`ru_maxrss`; not on Windows).

    On Linux a process begins with the `ru_maxrss` of the one that started it, which is therefore best small.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
