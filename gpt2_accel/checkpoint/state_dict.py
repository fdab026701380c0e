"""Converts the state of a run to the form of a checkpoint, and back.

In training the tensors may be on a GPU, wrapped by DDP or `torch.compile`, or sharded over the
ranks, and the optimizer numbers its parameters. In a checkpoint they are unsharded, in host memory,
under the names of the parameters.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import find_device, send_to_device
from safetensors.torch import load_file

from gpt2_accel.checkpoint.find import STATE
from gpt2_accel.models import LanguageModel, filled
from gpt2_accel.runtime.device import full_tensor, is_shard, synchronize


def unwrap(accelerator: Accelerator, model: torch.nn.Module) -> LanguageModel:
    """Returns the model without DDP and compilation.

    Its forward stays in mixed precision: Accelerate would remove that permanently, for training
    too.
    """
    return accelerator.unwrap_model(model, keep_fp32_wrapper=True, keep_torch_compile=False)


def full_model(
    accelerator: Accelerator, model: torch.nn.Module, empty: LanguageModel, trained: bool = False
) -> LanguageModel | None:
    """Copies the prepared model to host memory on the main process; returns None on the others.

    `empty` is its `skeleton`. With `trained` only the parameters that are trained are copied, and
    the others have no memory. All ranks must call it if the model is sharded: the shards are
    gathered, one tensor at a time.
    """
    state = unwrap(accelerator, model).state_dict(keep_vars=True)
    if trained:
        state = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
    tensors = gather_to_host(accelerator, state)
    return filled(empty, empty.state_dict() | tensors) if accelerator.is_main_process else None


def gather_to_host(
    accelerator: Accelerator, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gathers the tensors, one at a time, into host memory on the main process.

    Returns an empty dict on the others. From a GPU it copies into pinned memory, and waits once, at
    the end. Torch rounds each tensor of pinned memory up to a power of two, and keeps the memory
    for the next call. If the host has no pinned memory left, the copy is an ordinary one.
    """
    copies = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)  # a collective: all ranks call it
        if accelerator.is_main_process:
            full = full.detach().contiguous()  # safetensors needs contiguous tensors
            try:
                copies[name] = full.to("cpu", copy=True, non_blocking=True)
            except RuntimeError:
                copies[name] = full.to("cpu", copy=True)
    synchronize(accelerator.device)
    return copies


def shard_like(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor `full`, on the device of `tensor` and sharded like it.

    All ranks must call it if `tensor` is sharded. A tensor of another shape is not sharded, and one
    that is sharded already is returned unchanged.
    """
    if is_shard(full) or not is_shard(tensor) or full.shape != tensor.shape:
        return full.to(tensor.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, tensor.device_mesh, tensor.placements)


def split(
    states: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Returns the tensors of named states, and the other values by name and key.

    A tensor is `NAME/KEY`, or in a list `NAME/KEY/NUMBER`, with None in its place. Raises
    `ValueError` for a state that is not a dict.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        if not isinstance(state, Mapping):
            raise ValueError(
                f"the state of {name} is a {type(state).__name__}: return a dict of tensors, "
                "numbers, texts and lists"
            )
        for key, value in state.items():
            place = f"{name}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[place] = value
                continue
            if isinstance(value, list):
                value = value.copy()
                for number, each in enumerate(value):
                    if isinstance(each, torch.Tensor):
                        tensors[f"{place}/{number}"] = each
                        value[number] = None
            values.setdefault(name, {})[key] = value
    return tensors, values


def read_states(
    checkpoint: Path, file: str, values: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Returns named states, see `split`. A file in `training_state/` has their tensors.

    The tensors are on the CPU. The file is missing if there are none.
    """
    path = checkpoint / STATE / f"{file}.safetensors"
    tensors = load_file(path) if path.exists() else {}
    for place, tensor in tensors.items():
        name, _, key = place.partition("/")
        own = values.setdefault(name, {})
        listed, _, number = key.rpartition("/")
        # A memory-mapped tensor would keep the disk space of a removed checkpoint in use.
        if isinstance(own.get(listed), list):
            own[listed][int(number)] = tensor.clone()
        else:
            own[key] = tensor.clone()
    return values


@dataclass
class RunState:
    """What a checkpoint keeps of a run besides its tensors."""

    step: int = 0  # updates done
    run_id: str = ""  # the run's id in the trackers
    val_loss: float | None = None  # the loss at this step; None: not evaluated
    best: float | None = None  # the lowest validation loss so far
    waited: int = 0  # evaluations since `best`
    finish: int = 0  # a callback ends a run of so many updates or fewer
    finishing: bool = False  # it ends at this step
    changes: list[str] = field(default_factory=list)  # settings that resumes changed
    postponed: list[str] = field(default_factory=list)  # classes of callbacks, see `Run.postpone`

    def count(self, loss: float) -> None:
        """Counts an evaluation, by its validation loss."""
        self.val_loss = loss
        self.waited += 1
        if self.best is None or loss < self.best:
            self.best = loss
            self.waited = 0


def check_json(value: Any, place: str) -> None:
    """Raises `ValueError` if JSON would change a part of a value. `place` names the value."""
    if type(value) is dict and all(isinstance(key, str) for key in value):
        parts: Any = value.items()
    elif type(value) is list:
        parts = enumerate(value)
    elif isinstance(value, str | int | float | None):
        return
    else:
        raise ValueError(
            f"a checkpoint cannot hold {place}, a {type(value).__name__}: put tensors at the first "
            "level of a state or into lists there, and use numbers, texts, lists and dicts with "
            "texts as keys for the rest"
        )
    for key, part in parts:
        check_json(part, f"{place}/{key}")


class TrainingState:
    """The state of the optimizer, the fp16 gradient scaler, and the callbacks that have state.

    Build it before the first update, and before a resume loads the state. The state of a parameter
    has the parameter's name in the unwrapped model, that of a parameter group is `group#NUMBER`.
    The state of a callback has the name of its class, or `NAME#2` for the second of a class. Values
    that are not tensors are numbers, texts, lists and dicts, as in JSON. A parameter group keeps
    tensors, and values that have changed since: the others are settings, and a resume may have
    new ones.

    Raises `ValueError` if the optimizer has a parameter that the model does not have.
    """

    # The loop sets the learning rate, and the model has the parameters.
    SETTINGS = frozenset({"params", "param_names", "lr", "initial_lr"})

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        callbacks: Sequence[Any],
    ):
        self.accelerator = accelerator
        self.optimizer = optimizer
        # The class inside Accelerate's wrapper, such as `AdamW`.
        self.name = type(getattr(optimizer, "optimizer", optimizer)).__name__
        named = {id(p): name for name, p in unwrap(accelerator, model).named_parameters()}
        self.parameters: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in named:
                    raise ValueError(
                        f"{self.name} has a parameter of shape {tuple(parameter.shape)} that the "
                        "model does not have: give it parameters of the model that it gets"
                    )
                self.parameters[named[id(parameter)]] = parameter
        self.groups = {f"group#{i}": group for i, group in enumerate(optimizer.param_groups)}
        self.start = {name: self._values(group) for name, group in self.groups.items()}
        self.callbacks: dict[str, Any] = {}
        kinds: list[str] = []
        for callback in callbacks:
            if hasattr(callback, "state_dict"):
                kind = type(callback).__name__
                kinds.append(kind)
                number = kinds.count(kind)
                name = kind if number == 1 else f"{kind}#{number}"
                self.callbacks[name] = callback

    def _values(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns copies of a parameter group's values; a tuple, such as `betas`, as a list."""
        values = {}
        for key, value in group.items():
            if key not in self.SETTINGS:
                values[key] = deepcopy(list(value) if isinstance(value, tuple) else value)
        return values

    def collect(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Returns the tensors of each file in `training_state/`, and the rest, for `state.json`.

        The tensors stay on their devices, and sharded.
        """
        state = self.optimizer.state
        scaler = self.accelerator.scaler
        states = {name: state.get(p, {}) for name, p in self.parameters.items()}
        for name, start in self.start.items():
            now = self._values(self.groups[name])
            states[name] = {k: v for k, v in now.items() if find_device(v) or v != start.get(k)}
        tensors, others = split(states)
        groups = [others.pop(name, {}) for name in self.groups]
        named = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        callbacks, values = split(named)
        return {"optimizer": tensors, "callbacks": callbacks}, {
            "optimizer": self.name,
            "optimizer_values": {"state": others, "groups": groups},
            "callbacks": {name: {} for name in named} | values,
            "scaler": scaler.state_dict() if scaler else None,
        }

    def load_optimizer(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """Loads the state of the optimizer and the scaler from a checkpoint of this model.

        `saved` is its `state.json`. All ranks call it. Raises `ValueError` if the state belongs to
        another optimizer, or to another class of the model.
        """
        if saved["optimizer"] != self.name:
            raise ValueError(
                f"{checkpoint} was trained with {saved['optimizer']}, not {self.name}: "
                "resume with the --optimizer of the first run"
            )
        values = saved["optimizer_values"]
        count = len(values["groups"])
        if count != len(self.groups):
            raise ValueError(
                f"{checkpoint} was trained with {count} parameter groups of {self.name}, "
                f"not {len(self.groups)}: resume with the optimizer of the first run"
            )
        defaults = self.optimizer.defaults
        fused = defaults.get("fused") or defaults.get("capturable")
        groups = dict(zip(self.groups, values["groups"], strict=True))
        states = read_states(checkpoint, "optimizer", values["state"] | groups)
        for name, state in states.items():
            if name in self.groups:
                target = self.groups[name]
                parameter = target["params"][0]
            elif name in self.parameters:
                parameter = self.parameters[name]
                target = self.optimizer.state[parameter]
            else:
                raise ValueError(
                    f"{checkpoint} has the optimizer state of {name}, which the model does not "
                    "have: resume with the --attn_implementation of the first run"
                )
            for key, value in state.items():
                # As in torch: the kernels read a `step` on the host, unless they are fused.
                if isinstance(value, torch.Tensor) and (fused or key != "step"):
                    value = shard_like(value, parameter)
                elif isinstance(value, list):
                    value = send_to_device(value, parameter.device)
                target[key] = tuple(value) if isinstance(target.get(key), tuple) else value
        if self.accelerator.scaler and saved["scaler"]:
            self.accelerator.scaler.load_state_dict(saved["scaler"])

    def load_callbacks(self, checkpoint: Path, saved: dict[str, Any], ignore_missing: bool) -> None:
        """Loads the state of the callbacks. One whose state the checkpoint lacks starts new.

        `saved` is the checkpoint's `state.json`. Raises `ValueError` for the state of a callback
        that is absent, unless `ignore_missing`.
        """
        states = read_states(checkpoint, "callbacks", saved["callbacks"])
        absent = states.keys() - self.callbacks.keys()
        if absent and not ignore_missing:
            raise ValueError(
                f"{checkpoint} has the state of the callback {min(absent)}, which this run does "
                "not have: add it, or give --ignore_changes"
            )
        for name, callback in self.callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])
            else:
                self.accelerator.print(f"{checkpoint} has no state of {name}, which starts new")
