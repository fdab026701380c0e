"""Trains with another setting on rank 1, `OTHER`, as from a YAML file on a node's own disk."""

import os
import sys

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import train


def main() -> None:
    if os.environ["RANK"] == "1":
        name, value = os.environ["OTHER"].split()
        sys.argv += [f"--{name}", value]
    train(parse_config(TrainConfig))


if __name__ == "__main__":
    cli.run(main)
