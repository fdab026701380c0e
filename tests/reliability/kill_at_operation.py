"""Runs a script and kills its process before its N-th file system operation; with N = 0 never.

python kill_at_operation.py N PLACE SCRIPT ARGS ...

Operations are counted from the first one whose path contains PLACE. With the environment variable
SIGNAL the process sends itself that signal, forward passes count too, and the last line on stderr
is the number of operations.
"""

import itertools
import os
import runpy
import signal
import sys
from collections.abc import Iterator

import torch

SIGNAL = int(os.environ.get("SIGNAL", 0))
OPERATIONS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "symlink")


def die_before(number: int, place: str) -> Iterator[int]:
    """Makes this process kill itself before operation `number`; returns their counter."""
    numbers = itertools.count(1)  # shared by all threads
    begun = False

    def counted(operation):
        def run(path, *args, **kwargs):
            nonlocal begun
            begun = begun or place in str(path)
            if begun and next(numbers) == number:
                os.kill(os.getpid(), SIGNAL or signal.SIGKILL)
            return operation(path, *args, **kwargs)

        return run

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    if SIGNAL:
        torch.nn.Embedding.forward = counted(torch.nn.Embedding.forward)
    return numbers


_, number, place, *sys.argv = sys.argv
numbers = die_before(int(number), place) if SIGNAL or int(number) else None
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
if numbers:
    print(next(numbers), file=sys.stderr)
