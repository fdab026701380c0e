"""The CPU cores of this process, and whether the machine may have a GPU, without torch."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from gpt2_accel.rounding import ceil_div

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds in each period of so many
GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # devices of NVIDIA, AMD and WSL


def may_have_gpu() -> bool:
    """Whether this machine may have a GPU, by its device files: to ask torch takes seconds."""
    return sys.platform == "darwin" or any(any(Path("/dev").glob(name)) for name in GPU_FILES)


def missing_gpu() -> str:
    """Returns why torch has no GPU here, and how to fix it."""
    if may_have_gpu():
        return (
            "torch cannot use the GPU: install a build for its driver, see "
            "https://pytorch.org/get-started"
        )
    return "there is no GPU here: take the launch config cpu.yaml"


def usable_cpus() -> int:
    """Returns the number of CPU cores that this process may run on, by its affinity and the quota
    of its container."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # another system, or "max"
        quota, period = map(int, QUOTA.read_text().split())
        count = min(count, ceil_div(quota, period))
    return count
