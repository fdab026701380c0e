"""What the launch gives: processes, devices, precision, compilation."""

import os
import shutil
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend


def build_accelerator(deterministic: bool = False) -> Accelerator:
    """Accelerate as its config file and environment set it up, after checking that they took effect.

    `deterministic` asks for torch's deterministic algorithms.

    Raises `ValueError` if processes were started that Accelerate does not see, or if accumulation is set
    there: here it follows from the batch size.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    accelerator = Accelerator()
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != accelerator.num_processes:
        raise ValueError(
            f"WORLD_SIZE is {started}, but Accelerate sees {accelerator.num_processes} process(es): for "
            "several processes on a CPU put ACCELERATE_USE_CPU=true before the launch command"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            "gradient_accumulation_steps is set in the Accelerate config: remove it there, "
            "accumulation follows from --total_batch_size"
        )
    dynamo = accelerator.state.dynamo_plugin
    needs_cpp = dynamo.backend == DynamoBackend.INDUCTOR and accelerator.device.type == "cpu"
    if needs_cpp and not has_cpp_compiler():
        accelerator.print("no C++ compiler found (install g++ or set CXX): running uncompiled")
        dynamo.backend = DynamoBackend.NO
    return accelerator


def close(accelerator: Accelerator) -> None:
    """Ends the trackers and the connection between the processes."""
    accelerator.end_training()
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        # A thread of gloo's lets go of the last exchange's tensors a moment after the exchange, for which it
        # needs the interpreter: if that has ended by then, the process aborts.
        time.sleep(0.2)


def has_cpp_compiler() -> bool:
    """Whether inductor can compile for the CPU: it takes `CXX`, else g++ or clang++."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return any(shutil.which(name) for name in names)
