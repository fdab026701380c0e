"""Converts the tensors of a prepared model and optimizer to the form of a checkpoint, and back.

In training they may be on a GPU, wrapped by DDP or `torch.compile`, or sharded over the ranks, and the optimizer
numbers its parameters. In a checkpoint they are unsharded, in host memory, under the parameters' names.
"""

from collections.abc import Mapping

import torch
from accelerate import Accelerator

from gpt2_accel.device import is_shard, synchronize
from gpt2_accel.hf.convert import build
from gpt2_accel.models import LanguageModel


def unwrap(accelerator: Accelerator, model: torch.nn.Module) -> LanguageModel:
    """Returns the model without DDP and compilation.

    Its forward stays in mixed precision: Accelerate would remove that from the model in training too, permanently.
    """
    return accelerator.unwrap_model(model, keep_fp32_wrapper=True, keep_torch_compile=False)


def full_model(accelerator: Accelerator, model: torch.nn.Module) -> LanguageModel | None:
    """Copies the prepared model to host memory on the main process; returns None on the others.

    All ranks must call it if the model is sharded: the shards are gathered, one tensor at a time.
    """
    plain = unwrap(accelerator, model)
    tensors = gather_to_host(accelerator, plain.state_dict())
    return build(plain.config, tensors) if accelerator.is_main_process else None


def gather_to_host(
    accelerator: Accelerator, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gathers the tensors, one at a time, into host memory on the main process; returns an empty dict on the others.

    From a GPU it copies into pinned memory, and waits once, at the end. Torch rounds each tensor of pinned memory up to a
    power of two, and keeps the memory for the next call. If the host has no more of it, the copy is an ordinary one.
    """
    copies = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)  # a collective: all ranks call it
        if accelerator.is_main_process:
            try:
                copies[name] = full.detach().to("cpu", copy=True, non_blocking=True)
            except RuntimeError:
                copies[name] = full.detach().to("cpu", copy=True)
    synchronize(accelerator.device)
    return copies


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, gathered if it is sharded; all ranks must then call it."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class name of the optimizer inside Accelerate's wrapper, such as `AdamW`."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def parameters_by_name(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the parameters by name, in the order of their numbers in the optimizer's state dict."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the optimizer's state as `<parameter>/<state>` -> tensor."""
    return {
        f"{name}/{key}": tensor
        for name, parameter in parameters_by_name(optimizer).items()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """Loads the tensors of `optimizer_tensors` into `optimizer`, whose hyperparameters stay unchanged.

    Names and shapes are those of its parameters: the model is the checkpoint's.
    """
    parameters = parameters_by_name(optimizer)
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    for key, tensor in tensors.items():
        name, _, kind = key.partition("/")
        parameter = parameters[name]
        if tensor.ndim and is_shard(parameter):
            from torch.distributed.tensor import distribute_tensor

            mesh = parameter.device_mesh
            tensor = distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements)
        states[name][kind] = tensor
    groups = optimizer.state_dict()["param_groups"]
    state = dict(enumerate(states.values()))
    optimizer.load_state_dict({"state": state, "param_groups": groups})
