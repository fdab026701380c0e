"""The CPU cores of this process, without torch."""

import os

import psutil


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
