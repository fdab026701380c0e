"""A training run on FSDP2 over gloo, which Accelerate itself would offer for GPUs only."""

from accelerate import PartialState
from accelerate.utils import DistributedType

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import train


def main() -> None:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    train(parse_config(TrainConfig))


cli.run(main)
