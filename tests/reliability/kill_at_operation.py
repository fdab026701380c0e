"""Trains, and kills itself before the N-th change that a save makes on the disk; with N = 0 never.

python kill_at_operation.py N --data_dir ...
"""

import os
import signal
import sys

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import train

OPERATIONS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "symlink")


def die_before(number: int) -> None:
    """Counts from the second checkpoint on, when there is an older one to lose."""
    seen = {"save": False, "operations": 0}

    def counted(operation):
        def run(*args, **kwargs):
            seen["save"] |= ".checkpoint-4." in str(args[0])
            if seen["save"]:
                seen["operations"] += 1
                if seen["operations"] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return run

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


if number := int(sys.argv[1]):
    die_before(number)
train(parse_config(TrainConfig, sys.argv[2:]))
