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
MARGIN = 0.03  # share of the device's memory that a trial leaves free: allocations vary by update


@dataclass
class Launch:
    """A launch. `use_cpu` is True without GPUs."""

    num_processes: int
    mixed_precision: str
    is_fsdp2: bool
    use_cpu: bool


def state_bytes(
    config: TrainConfig, model: LanguageModel, shards: int = 1, on_cpu: bool = False
) -> dict[str, int]:
    """Returns the bytes per device of a model by part: frozen weights, trained weights or the
    adapter, gradients, optimizer state, and on a CPU the copies from which a checkpoint is written.

    FSDP2 shards the model over `shards` processes. Replicas of a sharded model are not considered.

    AdamW keeps two moments of each trained parameter, Muon one moment of each of its matrices.
    """
    sizes = {False: 0, True: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes // shards
    trained = sizes[True]
    moments = 2 * trained
    if config.optimizer == "muon":
        for _, matrix in hidden_matrices(model):
            moments -= matrix.nbytes // shards * matrix.requires_grad
    return {
        f"frozen {config.dtype} weights": sizes[False],
        "adapter" if config.lora else "weights": trained,
        "gradients": trained,
        "optimizer": moments,
        "checkpoint": (trained + moments) * on_cpu,
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


def activation_bytes(
    config: TrainConfig, shape: ModelConfig, precision: str, size: int, at_once: int | None = None
) -> int:
    """Returns the peak bytes of the activations of `size` sequences without compilation: tensors
    that autograd saves for the backward, and logits with their gradients, at most `at_once` logits
    at a time.

    With `checkpoint_activations` one block saves everything, the others save their input in fp32.
    LoRA saves about as much, with dropout 1.5 times as much (measured on a small GPT-2).
    """
    width = 2 if precision in AUTOCAST_DTYPES else 4
    tokens = size * config.tokens_per_sequence
    layers = 1 if config.checkpoint_activations else shape.n_layer
    saved = saved_bytes(
        shape.with_depth(layers), precision, size * config.rows, config.tokens_per_row
    )
    saved += (shape.n_layer - layers) * tokens * shape.n_embd * 4
    if config.lora_dropout:
        saved += saved // 2
    logits = tokens * shape.padded_vocab_size
    if logits <= LOGITS_AT_ONCE or not shape.has_plain_head:
        return saved + logits * (4 if width == 4 else 2 + 4)  # also a copy in fp32
    weight = shape.padded_vocab_size * shape.n_embd  # a copy, and the gradient of one chunk
    return saved + (min(logits, at_once or LOGITS_AT_ONCE) + 2 * weight) * width


def saved_bytes(shape: ModelConfig, precision: str, batch: int, length: int) -> int:
    """Returns the bytes that autograd saves for (batch, length) tokens, without the parameters,
    measured on fake tensors.

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

    dtype = AUTOCAST_DTYPES.get(precision)
    # torch's grouped_mm takes fake tensors in bf16 only; the other operator saves the same.
    other = patch.object(moe, "_can_use_grouped_mm", lambda *_: False, create=True)
    with FakeTensorMode(allow_non_fake_inputs=True), other:
        model = shape.build()
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        # Otherwise it prints a traceback for operations that it cannot run.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            with hooks, torch.autocast("cpu", dtype, enabled=dtype is not None):
                model(tokens, tokens)
        except RuntimeError:
            per_value = 34 if dtype is not None else 68
            values = shape.n_layer * batch * length * shape.n_embd * (shape.experts_per_token or 1)
            return per_value * values
        for parameter in model.parameters():
            seen.pop(parameter.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in seen.values())


def fitting_batch_size(
    config: TrainConfig,
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Callable[[torch.nn.Module, Batch], Any],
    packed: bool = False,
) -> int:
    """Returns the largest micro-batch, in sequences per device, that divides the batch evenly and
    fits on every rank.

    The memory is estimated. On a GPU the size is then tried with random tokens: the objective and
    its backward, with gradients, memory reserved for the optimizer state, and a `MARGIN`; if it
    does not fit, the next smaller size is tried. On a CPU, or with a sharded model, running out of
    memory cannot be caught, so the estimate decides. Parameters and random states do not change.
    `packed`: batches have `documents`.

    Raises `ValueError` if one sequence does not fit, or if `batch_schedule` refuses the settings.
    """
    device = accelerator.device
    processes = accelerator.num_processes
    plain = unwrap(accelerator, model)
    length = config.tokens_per_sequence
    shards = processes if accelerator.is_fsdp2 else 1
    on_cpu = device.type == "cpu"
    state = state_bytes(config, plain, shards, on_cpu)

    def needed(size: int) -> float:
        at_once = kernels.choices.logits_at_once
        activations = activation_bytes(
            config, plain.config, accelerator.mixed_precision, size, at_once
        )
        new = state["gradients"] + state["optimizer"] + state["checkpoint"]  # beside the weights
        return new + activations * (HEAP if on_cpu else 1)

    per_device = config.batch_schedule(processes).full // processes
    sizes = [size for size in range(1, per_device + 1) if per_device % size == 0]
    free = free_memory(device)
    if device.type != "cuda":
        free //= processes  # the processes share the machine's memory
    fitting = sizes[: bisect_left(sizes, FREE * free, key=needed)]
    if reports_out_of_memory(device) and not accelerator.is_fsdp2:
        fitting = fitting or sizes[:1]
        while fitting:
            if trial_fits(accelerator, model, objective, (fitting[-1], length), packed):
                break
            fitting.pop()
    best = fitting[-1] if fitting else 0
    best = int(accelerator.gather(torch.tensor([best], device=device)).min())
    if not best:
        raise ValueError(
            "not even a micro-batch of one sequence fits into memory: lower --sequence_length, "
            "fine-tune with --lora 16, or shard the model (launch config 8xa100_fsdp2.yaml); "
            f"{in_words(state)}"
        )
    accelerator.print(f"micro_batch_size {best}: the largest that fits into memory")
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
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        margin = int(MARGIN * total_memory(device))
        reserve = [torch.empty(margin, dtype=torch.uint8, device=device)]
        for parameter in parameters:
            reserve += [torch.empty_like(parameter), torch.empty_like(parameter)]
            parameter.grad = torch.zeros_like(parameter)  # exists from the second micro-batch on
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
        for parameter in parameters:
            parameter.grad = None
        # Otherwise the trials count towards Dynamo's recompile limit, beyond which new sizes run
        # uncompiled.
        torch.compiler.reset()
        release_memory()
