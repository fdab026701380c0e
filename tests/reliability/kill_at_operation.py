"""Trains, and kills itself before the N-th change that a save makes on the disk.

    python kill_at_operation.py  <  one JSON line per run: {"flags": […], "kill_at": N or null}

Answers each line with the exit code of the run, a process forked from this one, which has imported all
that it needs but computed nothing.
"""

import json
import os
import signal
import sys

import gpt2_accel.train
from gpt2_accel.config import TrainConfig, parse_config

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


for line in sys.stdin:
    order = json.loads(line)
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)
        if order["kill_at"]:
            die_before(order["kill_at"])
        gpt2_accel.train.train(parse_config(TrainConfig, order["flags"]))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
