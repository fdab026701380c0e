"""A recipe with the package's defaults, for tests that launch processes.

The environment variable `LOGITS_AT_ONCE` makes the loss of small models chunked too.
"""

import os

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.kernels import cross_entropy
from gpt2_accel.train import train

cross_entropy.LOGITS_AT_ONCE = int(os.environ.get("LOGITS_AT_ONCE", cross_entropy.LOGITS_AT_ONCE))


def main() -> None:
    train(parse_config(TrainConfig))


if __name__ == "__main__":
    cli.run(main)
