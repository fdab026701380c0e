"""Memory per device of a training run, and the largest micro-batch that fits."""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2_accel import kernels
from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch
from gpt2_accel.hf.convert import configured_shape, read_config
from gpt2_accel.hf.lora import NEEDS_MODEL, add_lora, set_dtype
from gpt2_accel.kernels.cross_entropy import LOGITS_AT_ONCE
from gpt2_accel.models import LanguageModel, ModelConfig, check_loaded
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.optim import hidden_matrices
from gpt2_accel.runtime.device import (
    AUTOCAST_DTYPES,
    free_memory,
    reports_out_of_memory,
    total_memory,
)
from gpt2_accel.runtime.files import readable_size

FREE = 0.9  # share of the free memory that an estimate may fill
LIBRARIES = 550_000_000  # resident bytes of a process on a CPU before it has a model
HEAP = 1.15  # allocated bytes / bytes of activations on a CPU: blocks of several sizes leave gaps
# The most tokens of a micro-batch of `auto`, by whether it is on a CPU: larger ones are not faster.
MOST_TOKENS = {False: 65_536, True: 16_384}
MARGIN = 0.03  # share of the device's memory that a trial leaves free: allocations vary by update


@dataclass
class Launch:
    """A launch. `use_cpu` is True without GPUs. `logits_at_once` is that of `kernels.choices`."""

    num_processes: int
    mixed_precision: str
    is_fsdp2: bool
    use_cpu: bool
    logits_at_once: int | None = None


def state_bytes(config: TrainConfig, model: LanguageModel, launch: Launch) -> dict[str, int]:
    """Returns the bytes per device of a model by part: frozen weights, trained weights or the
    adapter, gradients, optimizer state, and on a CPU the copies from which a checkpoint is written.

    FSDP2 shards the model over all processes. Replicas of a sharded model are not considered.

    AdamW keeps two moments of each trained parameter, Muon one moment of each of its matrices.
    """
    shards = launch.num_processes if launch.is_fsdp2 else 1
    sizes = {False: 0, True: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes // shards
    trained = sizes[True]
    moments = 2 * trained
    if config.optimizer == "muon":
        for matrix in hidden_matrices(model).values():
            moments -= matrix.nbytes // shards * matrix.requires_grad
    return {
        f"frozen {config.dtype} weights": sizes[False],
        "adapter" if config.lora else "weights": trained,
        "gradients": trained,
        "optimizer": moments,
        "checkpoint": (trained + moments) * launch.use_cpu,
    }


def in_words(parts: dict[str, int]) -> str:
    """Returns the parts of the memory with their sizes as text, without empty parts."""
    return ", ".join(f"{part} {readable_size(size)}" for part, size in parts.items() if size)


def model_shape(config: TrainConfig, vocab_size: int) -> ModelConfig:
    """Returns the model shape of `init_from`, or without it the shape in the settings.

    Raises `ValueError` for LoRA without `init_from` and for a model that cannot be trained.
    """
    if config.init_from is None:
        if config.lora:
            raise ValueError(NEEDS_MODEL)
        return configured_shape(config, vocab_size)
    shape = read_config(config.init_from, reason="--lora" if config.lora else None)
    check_loaded(config, shape)
    return shape


def planned_model(config: TrainConfig, shape: ModelConfig) -> LanguageModel:
    """Returns the model of a run, on the meta device. Raises peft's errors for LoRA."""
    with torch.device("meta"):
        model = shape.build()
        if config.lora:
            assert isinstance(model, AnyModel)
            add_lora(model, config, (), "")
    set_dtype(model, config)
    return model


def activation_bytes(config: TrainConfig, shape: ModelConfig, launch: Launch, size: int) -> int:
    """Returns the peak bytes of the activations of `size` sequences without compilation: tensors
    that autograd saves for the backward, and logits with their gradients, at most
    `launch.logits_at_once` at a time; on a CPU with the gaps between them.

    With `checkpoint_activations` one block saves everything, the others save their input in fp32.
    LoRA saves about as much, with dropout 1.5 times as much (measured on a small GPT-2).
    """
    dtype = AUTOCAST_DTYPES.get(launch.mixed_precision)
    layers = 1 if config.checkpoint_activations else shape.n_layer
    tokens = torch.zeros(size * config.rows, config.tokens_per_row, dtype=torch.int64)
    count = saved_bytes(shape.with_depth(layers), dtype, tokens)
    count += (shape.n_layer - layers) * tokens.numel() * shape.n_embd * 4
    if config.lora_dropout:
        count += count // 2
    logits = tokens.numel() * shape.padded_vocab_size
    if logits <= LOGITS_AT_ONCE or not shape.has_plain_head:
        count += logits * (6 if dtype else 4)  # in half precision also a copy in fp32
    else:
        weight = shape.padded_vocab_size * shape.n_embd  # a copy, and the gradient of one chunk
        at_once = min(logits, launch.logits_at_once or LOGITS_AT_ONCE)
        count += (at_once + 2 * weight) * (2 if dtype else 4)
    return int(HEAP * count) if launch.use_cpu else count


def saved_bytes(shape: ModelConfig, dtype: torch.dtype | None, tokens: torch.Tensor) -> int:
    """Returns the bytes that autograd saves for `tokens`, (B, T), without the parameters, measured
    on fake tensors. `dtype` is that of autocast, or None.

    The rare classes of `transformers` that fake tensors cannot run, such as JetMoE, are estimated:
    34 bytes per layer, token and channel in half precision, without attention scores (Korthikanti
    et al., 2022, arXiv:2205.05198, equation 2), times the experts of a token.
    """
    from transformers.integrations import moe

    seen: dict[int, torch.UntypedStorage] = {}  # kept alive: ids are not reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage
        return tensor

    # torch's grouped_mm takes fake tensors in bf16 only; the other operator saves the same.
    other = patch.object(moe, "_can_use_grouped_mm", lambda *_: False, create=True)
    with FakeTensorMode(allow_non_fake_inputs=True), other:
        model = shape.build()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        # Otherwise it prints a traceback for operations that it cannot run.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            with hooks, torch.autocast("cpu", dtype, enabled=bool(dtype)):
                model(tokens, tokens)
        except RuntimeError:
            values = shape.n_layer * tokens.numel() * shape.n_embd * (shape.experts_per_token or 1)
            return (34 if dtype else 68) * values
        for parameter in model.parameters():
            seen.pop(parameter.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in seen.values())


def fitting_sizes(
    config: TrainConfig, shape: ModelConfig, launch: Launch, free: float, state: int
) -> list[int]:
    """Returns the micro-batches, in sequences per device, that divide the batch evenly, have at
    most `MOST_TOKENS` and by the estimate fit into `free` bytes beside `state`, in ascending order.

    Raises what `batch_schedule` raises.
    """

    def needed(size: int) -> int:
        return state + activation_bytes(config, shape, launch, size)

    per_device = config.batch_schedule(launch.num_processes).full // launch.num_processes
    most = max(1, MOST_TOKENS[launch.use_cpu] // config.tokens_per_sequence)
    sizes = [size for size in range(1, min(per_device, most) + 1) if per_device % size == 0]
    return sizes[: bisect_left(sizes, FREE * free, key=needed)]


def fitting_batch_size(
    config: TrainConfig,
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Callable[[torch.nn.Module, Batch], Any],
    packed: bool = False,
) -> int:
    """Returns the largest micro-batch, in sequences per device, of `fitting_sizes` that fits on
    every rank.

    On a GPU all ranks try a size with random tokens: the objective and its backward, with
    gradients, memory reserved for the optimizer state, and a `MARGIN`; if it does not fit on one of
    them, the next smaller size is tried. The model that is compiled for the size trains. On a CPU,
    or with a sharded model, running out of memory cannot be caught, so the estimate decides.
    Parameters and random states do not change. `packed`: batches have `documents`.

    Raises `ValueError` if one sequence does not fit, or if `batch_schedule` refuses the settings.
    """
    device = accelerator.device
    processes = accelerator.num_processes
    plain = unwrap(accelerator, model)
    launch = Launch(
        processes,
        accelerator.mixed_precision,
        accelerator.is_fsdp2,
        device.type == "cpu",
        kernels.choices.logits_at_once,
    )
    parts = state_bytes(config, plain, launch)
    new = parts["gradients"] + parts["optimizer"] + parts["checkpoint"]  # beside the weights
    free = free_memory(device)
    if device.type != "cuda":
        free //= processes  # the processes share the machine's memory
    fitting = fitting_sizes(config, plain.config, launch, free, new)

    def on_all(value: int) -> int:
        return int(accelerator.gather(torch.tensor([value], device=device)).min())

    best = on_all(fitting[-1] if fitting else 0)
    if reports_out_of_memory(device) and not accelerator.is_fsdp2:
        for size in reversed([size for size in fitting if size <= best] or [1]):
            shape = (size, config.tokens_per_sequence)
            if on_all(trial_fits(accelerator, model, objective, shape, packed)):
                return size
            # Otherwise Dynamo would compile the next size with a dynamic shape.
            torch.compiler.reset()
        best = 0
    if not best:
        raise ValueError(
            "not even a micro-batch of one sequence fits into memory: lower --sequence_length, "
            "fine-tune with --lora 16, or shard the model (launch config 8xa100_fsdp2.yaml); "
            f"{in_words(parts)}"
        )
    return best


def trial_fits(
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Callable[[torch.nn.Module, Batch], Any],
    shape: tuple[int, int],
    packed: bool,
) -> bool:
    """Whether the objective and its backward fit into memory, for a batch of this shape."""
    device = accelerator.device
    try:
        margin = int(MARGIN * total_memory(device))
        reserve = [torch.empty(margin, dtype=torch.uint8, device=device)]
        for parameter in model.parameters():
            if parameter.requires_grad:
                reserve += [torch.empty_like(parameter), torch.empty_like(parameter)]
                parameter.grad = torch.zeros_like(parameter)  # as from the second micro-batch on
        tokens = torch.randint(0, 100, shape, device=device)
        batch = Batch(tokens, tokens, documents=tokens * 0 if packed else None)
        with accelerator.no_sync(model):
            result = objective(model, batch)
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
        del reserve
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad()
        release_memory()
