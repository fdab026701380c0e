"""A training run whose processes do not see each other's folders, as on nodes with local disks."""

import os

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import train


def main() -> None:
    folder = f"{os.environ['DISKS']}/node{os.environ['RANK']}"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    train(parse_config(TrainConfig))


if __name__ == "__main__":
    cli.run(main)
