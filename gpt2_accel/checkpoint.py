"""Checkpoints: an HF model directory, and under `training_state/` what only a resume needs.

    checkpoint-<step>/
        config.json, model.safetensors, tokenizer.json, …      opens in transformers
        training_state/optimizer.safetensors                   its tensors, by parameter name
        training_state/state.json                              step, optimizer, gradient scaler

There is little to keep: the order of the data, the learning rate and the random seeds are functions
of the step. A checkpoint is written aside and renamed, so a folder of that name is whole.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from gpt2_accel import hub
from gpt2_accel.convert import save_pretrained
from gpt2_accel.files import atomic_directory, write_json
from gpt2_accel.model import GPT

STATE = "training_state"


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first."""
    found = {
        int(match[1]): path
        for path in Path(run_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [found[step] for step in sorted(found)]


def find_checkpoint(resume_from: str | None, run_dir: str | Path) -> Path | None:
    """The checkpoint that `--resume_from` means, None for a fresh start.

    A Hub id means what a run with `--hub_strategy checkpoint` pushed there.
    Raises `FileNotFoundError` if the path is not a checkpoint, `FileExistsError` if a fresh start would
    write into a folder that holds the checkpoints of another run.
    """
    checkpoints = list_checkpoints(run_dir)
    if resume_from is None:
        if checkpoints:
            raise FileExistsError(
                f"{run_dir} holds {checkpoints[-1].name} of an earlier run: continue it with "
                "--resume_from latest, or choose another --output_dir"
            )
        return None
    if resume_from == "latest":
        return checkpoints[-1] if checkpoints else None
    path = Path(resume_from)
    if not path.exists() and hub.is_repo_id(resume_from):
        path = hub.download(resume_from, ("*",), hub.LAST_CHECKPOINT)
    if not (path / STATE / "state.json").is_file():
        raise FileNotFoundError(
            f"--resume_from {resume_from} is not a checkpoint of this toolkit: give a checkpoint-<step> "
            "folder, or a Hub id that a run with --hub_strategy checkpoint pushed to"
        )
    return path


def model_directory(name: str | Path) -> str | Path:
    """Where the newest weights of a run's folder are: in the folder itself once training has ended, in
    its last checkpoint before. Any other name is returned as it is."""
    checkpoints = list_checkpoints(name)
    if checkpoints and not (Path(name) / "config.json").exists():
        return checkpoints[-1]
    return name


def save_checkpoint(
    run_dir: str | Path,
    step: int,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    training: hub.Training,
    keep_last: int,
) -> Path:
    """Writes `checkpoint-<step>`, then removes all but the newest `keep_last`. All ranks call it.

    `model` and `optimizer` are the prepared ones; `step` is the number of updates done; `training` is
    for the model card.
    """
    path = Path(run_dir) / f"checkpoint-{step}"
    if accelerator.is_main_process and not path.exists():
        scaler = accelerator.scaler
        with atomic_directory(path) as folder:
            save_pretrained(unwrap(accelerator, model), folder, tokenizer, training=training)
            (folder / STATE).mkdir()
            save_file(optimizer_tensors(optimizer), folder / STATE / "optimizer.safetensors")
            state = {
                "step": step,
                "optimizer": optimizer_name(optimizer),
                "scaler": scaler.state_dict() if scaler else None,
            }
            write_json(folder / STATE / "state.json", state)
        for old in list_checkpoints(run_dir)[:-keep_last]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return path


def load_training_state(
    path: Path, accelerator: Accelerator, optimizer: torch.optim.Optimizer
) -> int:
    """Puts a checkpoint's optimizer and scaler state back; returns how many updates were done.

    The weights are not its business: the model was built from the same folder.
    Raises `ValueError` if the state is that of another optimizer or model.
    """
    state = json.loads((path / STATE / "state.json").read_text(encoding="utf-8"))
    if state["optimizer"] != optimizer_name(optimizer):
        raise ValueError(
            f"{path} was trained with {state['optimizer']}, not {optimizer_name(optimizer)}: "
            "resume with the --optimizer of the first run"
        )
    load_optimizer_tensors(optimizer, load_file(path / STATE / "optimizer.safetensors"), path)
    if accelerator.scaler and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    return state["step"]


def unwrap(accelerator: Accelerator, model: torch.nn.Module) -> GPT:
    """The plain `GPT` inside what Accelerate prepared: no DDP, no compilation."""
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)


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
            if tensor.ndim and tensor.shape != parameter.shape:
                raise ValueError(
                    f"{source} the state {kind} of {name} in the shape {tuple(tensor.shape)}, not "
                    f"{tuple(parameter.shape)}: resume with the settings of the first run"
                )
    optimizer.load_state_dict(
        {
            "state": dict(enumerate(states.values())),
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
