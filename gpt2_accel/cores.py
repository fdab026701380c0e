"""The number of CPU cores, without torch."""

import os

import psutil


def usable_cpus() -> int:
    """Returns the number of CPU cores that this process may run on."""
    return (
        len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count() or 1
    )
