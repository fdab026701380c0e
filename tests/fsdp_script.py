"""A training run with FSDP2 over gloo, which Accelerate offers for GPUs only."""

from accelerate import PartialState
from accelerate.utils import DistributedType
from train_script import main

from gpt2_accel import cli


def sharded() -> None:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    main()


cli.run(sharded)
