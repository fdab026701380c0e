"""A recipe with the package's defaults, for tests that launch processes.

Environment variables: `LOGITS_AT_ONCE` makes the loss of small models chunked too; `OTHER` has
flags of rank 1 only; with `DISKS`, each process works in its own folder, as on a local disk.
"""

import os
import sys

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.kernels import cross_entropy
from gpt2_accel.train import train

cross_entropy.LOGITS_AT_ONCE = int(os.environ.get("LOGITS_AT_ONCE", cross_entropy.LOGITS_AT_ONCE))


def main() -> None:
    rank = os.environ.get("RANK", "0")
    if "DISKS" in os.environ:
        folder = f"{os.environ['DISKS']}/node{rank}"
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    if rank == "1":
        sys.argv += os.environ.get("OTHER", "").split()
    train(parse_config(TrainConfig))


if __name__ == "__main__":
    cli.run(main)
