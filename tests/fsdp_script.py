"""A training run with FSDP2 over gloo, which Accelerate offers for GPUs only. `RECIPE` names a recipe instead of train_script."""

import importlib
import os
import sys

from accelerate import PartialState
from accelerate.utils import DistributedType
from launching import ROOT

from gpt2_accel import cli


def sharded() -> None:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    sys.path.append(str(ROOT / "recipes"))
    importlib.import_module(os.environ.get("RECIPE", "train_script")).main()


cli.run(sharded)
