"""Converts the tensors of a prepared model and optimizer to the form of a checkpoint, and back.

In training they may be on a GPU, wrapped by DDP or `torch.compile`, or sharded over the ranks, and the optimizer
numbers its parameters. In a checkpoint they are unsharded, in host memory, under the parameters' names.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from gpt2_accel.checkpoint.find import STATE
from gpt2_accel.models import LanguageModel, filled
from gpt2_accel.runtime.device import is_shard, synchronize


def unwrap(accelerator: Accelerator, model: torch.nn.Module) -> LanguageModel:
    """Returns the model without DDP and compilation.

    Its forward stays in mixed precision: Accelerate would remove that from the model in training too, permanently.
    """
    return accelerator.unwrap_model(model, keep_fp32_wrapper=True, keep_torch_compile=False)


def full_model(
    accelerator: Accelerator, model: torch.nn.Module, empty: LanguageModel
) -> LanguageModel | None:
    """Copies the prepared model to host memory on the main process; returns None on the others. `empty` is its `skeleton`.

    All ranks must call it if the model is sharded: the shards are gathered, one tensor at a time.
    """
    plain = unwrap(accelerator, model)
    tensors = gather_to_host(accelerator, plain.state_dict())
    return filled(empty, tensors) if accelerator.is_main_process else None


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
            full = full.detach().contiguous()  # as safetensors needs it
            try:
                copies[name] = full.to("cpu", copy=True, non_blocking=True)
            except RuntimeError:
                copies[name] = full.to("cpu", copy=True)
    synchronize(accelerator.device)
    return copies


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, gathered if it is sharded; all ranks must then call it."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def shard_like(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a full tensor, sharded and on the device as `tensor` is; all ranks must call it if that is sharded. A tensor
    that is sharded already is returned unchanged."""
    if is_shard(full) or not is_shard(tensor):
        return full.to(tensor.device)
    from torch.distributed.tensor import distribute_tensor

    mesh = tensor.device_mesh
    return distribute_tensor(full.to(mesh.device_type), mesh, tensor.placements)


class CallbackState:
    """The state of the callbacks that have one, for a checkpoint, by class name; a second of a class is `NAME#2`."""

    FILE = f"{STATE}/callbacks.safetensors"

    def __init__(self, callbacks: Sequence[Any]):
        self.callbacks: dict[str, Any] = {}
        for callback in callbacks:
            if hasattr(callback, "state_dict"):
                name = key = type(callback).__name__
                number = 1
                while key in self.callbacks:
                    number += 1
                    key = f"{name}#{number}"
                self.callbacks[key] = callback

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors as `<callback>/<name>`, on their devices, sharded as they are."""
        return {
            f"{key}/{name}": value
            for key, callback in self.callbacks.items()
            for name, value in callback.state_dict().items()
            if isinstance(value, torch.Tensor)
        }

    def values(self) -> dict[str, dict[str, Any]]:
        """Returns the other values of each callback."""
        found: dict[str, dict[str, Any]] = {}
        for key, callback in self.callbacks.items():
            state = callback.state_dict().items()
            found[key] = {k: value for k, value in state if not isinstance(value, torch.Tensor)}
        return found

    def load(self, checkpoint: Path, saved: dict[str, Any], ignore_missing: bool) -> list[str]:
        """Hands the callbacks what `checkpoint`, with the state `saved`, has of them. Returns a note for each that starts anew.

        Raises `ValueError` for the state of a callback that is absent, unless `ignore_missing`."""
        values = saved.get("callbacks", {})
        if (absent := values.keys() - self.callbacks.keys()) and not ignore_missing:
            raise ValueError(
                f"{checkpoint} has the state of the callback {min(absent)}, which this run does not have: add it, or give "
                "--ignore_changes"
            )
        file = checkpoint / self.FILE
        for place, tensor in (load_file(file) if file.is_file() else {}).items():
            key, _, name = place.partition("/")
            values[key][name] = tensor.clone()
        notes = []
        for key, callback in self.callbacks.items():
            if key in values:
                callback.load_state_dict(values[key])
            else:
                notes.append(f"the callback {key} has no state in {checkpoint}: it starts anew")
        return notes


class OptimizerState:
    """The state of an optimizer, for a checkpoint. Build it before the first update, and before a resume loads the state.

    Tensors are named `<parameter>/<state>`, by the parameter's name in the unwrapped `model`. Other values are numbers, texts,
    lists and dicts of them, as JSON has them. Of a parameter group only the values that have changed since are part of the
    state: the others are settings, and a resume may have new ones.

    Raises `ValueError` if the optimizer has a parameter that the model does not have.
    """

    # The loop sets the rate; the parameters are in the model.
    SETTINGS = frozenset({"params", "param_names", "lr", "initial_lr"})

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in named:
                    raise ValueError(
                        f"{self.name} has a parameter of shape {tuple(parameter.shape)} that the model does not have: give "
                        "it parameters of the model that it gets"
                    )
                self.parameters[named[id(parameter)]] = parameter
        self.start = [self._values(group) for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        """The class name of the optimizer inside Accelerate's wrapper, such as `AdamW`."""
        return type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__

    def _values(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: copy(value) for key, value in group.items() if key not in self.SETTINGS}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the parameters' state, on their devices, sharded as they are."""
        return {name: value for name, value in self._entries() if isinstance(value, torch.Tensor)}

    def values(self) -> dict[str, Any]:
        """Returns the rest: `state` has the other values of the parameters, `groups` the changed values of each group."""
        others = {k: value for k, value in self._entries() if not isinstance(value, torch.Tensor)}
        groups = []
        for group, start in zip(self.optimizer.param_groups, self.start, strict=True):
            now = self._values(group)
            groups.append({key: value for key, value in now.items() if value != start.get(key)})
        return {"state": others, "groups": groups}

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}/{key}", value

    def load(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Loads what `tensors` and `values` returned; the other values of the groups stay.

        Names and shapes are those of the parameters: the model is the checkpoint's.
        """
        states: dict[str, dict[str, Any]] = {name: {} for name in self.parameters}
        for key, value in {**tensors, **values.get("state", {})}.items():
            name, _, kind = key.partition("/")
            parameter = self.parameters[name]
            if isinstance(value, torch.Tensor) and value.ndim:
                value = shard_like(value, parameter)
            states[name][kind] = value
        groups = self.optimizer.state_dict()["param_groups"]
        for group, changed in zip(groups, values.get("groups", []), strict=False):
            group.update(changed)
        state = dict(enumerate(states.values()))
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for key in tensors:  # torch gave them the dtype of their parameter
            name, _, kind = key.partition("/")
            loaded = self.optimizer.state[self.parameters[name]]
            loaded[kind] = states[name][kind].to(loaded[kind].device)
