"""The CPU cores of this process, and whether the machine may have a GPU, without torch."""

import os
import sys
from pathlib import Path

import psutil

GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # of NVIDIA's and AMD's drivers, and of WSL


def may_have_gpu() -> bool:
    """Whether this machine may have a GPU, by its device files: to ask torch takes seconds."""
    return sys.platform == "darwin" or any(any(Path("/dev").glob(name)) for name in GPU_FILES)


def usable_cores() -> list[int] | None:
    """Returns the numbers of the CPU cores that this process may run on; None on a system that does not say."""
    return psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else None


def usable_cpus() -> int:
    """Returns the number of CPU cores that this process may run on."""
    return len(usable_cores() or ()) or os.cpu_count() or 1


def stay_on(core: int) -> None:
    """Keeps this process on one CPU core, on a system that can."""
    if hasattr(psutil.Process, "cpu_affinity"):
        psutil.Process().cpu_affinity([core])
