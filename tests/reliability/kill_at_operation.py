"""Runs a script and kills its process before its N-th file system operation; with N = 0 never.

python kill_at_operation.py N PLACE SCRIPT ARGS ...

Operations are counted from the first one whose path contains PLACE.
"""

import itertools
import os
import runpy
import signal
import sys

OPERATIONS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "symlink")


def die_before(number: int, place: str) -> None:
    """Makes this process kill itself before operation `number`."""
    numbers = itertools.count(1)  # shared by all threads
    begun = False

    def counted(operation):
        def run(path, *args, **kwargs):
            nonlocal begun
            begun = begun or place in str(path)
            if begun and next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(path, *args, **kwargs)

        return run

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


_, number, place, *sys.argv = sys.argv
if int(number):
    die_before(int(number), place)
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
