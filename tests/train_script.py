"""A recipe without defaults of its own, for tests that launch processes."""

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import train

cli.run(lambda: train(parse_config(TrainConfig)))
