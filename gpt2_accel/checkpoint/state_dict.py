"""The tensors of a prepared model and optimizer, as a checkpoint holds them, and back.

In training they may be on a GPU, wrapped by DDP or compilation, or sharded over the ranks, and the optimizer
numbers its parameters. In a checkpoint they are whole, in host memory, by the parameters' names.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor, distribute_tensor

from gpt2_accel.hf.convert import build
from gpt2_accel.models import LanguageModel


def unwrap(accelerator: Accelerator, model: torch.nn.Module) -> LanguageModel:
    """The model inside what Accelerate prepared: no DDP, no compilation.

    Its forward stays in mixed precision: to take that off, Accelerate would take it off the model that
    is being trained, for good.
    """
    return accelerator.unwrap_model(model, keep_fp32_wrapper=True, keep_torch_compile=False)


def full_model(accelerator: Accelerator, model: torch.nn.Module) -> LanguageModel | None:
    """A copy of the prepared model in host memory, on the main process; None on the others.

    If it is sharded all ranks call this: the shards are gathered, one tensor at a time.
    """
    plain = unwrap(accelerator, model)
    tensors = gather_to_host(accelerator, plain.state_dict())
    return build(plain.config, tensors) if accelerator.is_main_process else None


def gather_to_host(
    accelerator: Accelerator, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies of the tensors in host memory on the main process, nothing on the others; gathered one at a time."""
    copies = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)  # all ranks take part
        if accelerator.is_main_process:
            copies[name] = full.detach().to("cpu", copy=True)
    return copies


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, gathered from all ranks if it is sharded; then all ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The class inside Accelerate's wrapper, such as `AdamW`."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names in the order in which the optimizer's state dict numbers them."""
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as `<parameter>/<state>` -> tensor."""
    names = parameter_names(optimizer)
    return {
        f"{names[number]}/{key}": tensor
        for number, values in optimizer.state_dict()["state"].items()
        for key, tensor in values.items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], source: Path
) -> None:
    """The inverse of `optimizer_tensors`; the settings stay those of `optimizer`.

    Raises `ValueError` if the tensors are not those of its parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = parameter_names(optimizer)
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        name, _, kind = key.partition("/")
        if name not in states:
            raise ValueError(f"{source} holds optimizer state of {name}, which this model has not")
        states[name][kind] = tensor
    for name, parameter in zip(names, parameters, strict=True):
        for kind, tensor in states[name].items():
            if tensor.ndim and isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
                mesh, placements = parameter.device_mesh, parameter.placements
                states[name][kind] = distribute_tensor(
                    tensor.to(mesh.device_type), mesh, placements
                )
            elif tensor.ndim and tensor.shape != parameter.shape:
                raise ValueError(
                    f"{source} has the state {kind} of {name} in the shape {tuple(tensor.shape)}, not "
                    f"{tuple(parameter.shape)}: resume with the settings of the first run"
                )
    optimizer.load_state_dict(
        {
            "state": dict(enumerate(states.values())),
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
