"""Memory per device of a training run (weights, gradients, optimizer state, activations), and the largest micro-batch that fits."""

import logging
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
MARGIN = 0.03  # of the device's memory, which a trial leaves free: allocations vary between updates


@dataclass
class Launch:
    """A launch. `shards` is the number of processes over which FSDP2 shards the model, 1 without
    it; `use_cpu` says that there are no GPUs."""

    num_processes: int
    mixed_precision: str
    shards: int
    use_cpu: bool


def shard_count(processes: int, is_fsdp2: bool) -> int:
    """Returns over how many processes of this launch FSDP2 shards the model, those of a replica; 1
    without it."""
    if not is_fsdp2:
        return 1
    return processes // int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))


def state_bytes(config: TrainConfig, model: LanguageModel, shards: int = 1) -> dict[str, int]:
    """Returns the bytes per device of a model, by part: weights that are not trained, trained
    weights or the adapter, their gradients and their optimizer state.

    AdamW keeps two moments of each trained parameter; Muon keeps one of its matrices."""
    sizes = {False: 0, True: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes // shards
    trained = sizes[True]
    moments = 2 * trained
    for _, parameter in hidden_matrices(model) if config.optimizer == "muon" else []:
        moments -= parameter.requires_grad * parameter.nbytes // shards
    return {
        f"frozen {config.dtype} weights": sizes[False],
        "adapter" if config.lora else "weights": trained,
        "gradients": trained,
        "optimizer": moments,
    }


def in_words(parts: dict[str, int]) -> str:
    """Returns the parts of the memory that are not empty, with their sizes."""
    return ", ".join(f"{part} {readable_size(size)}" for part, size in parts.items() if size)


def model_shape(config: TrainConfig, vocab_size: int) -> ModelConfig:
    """Returns the model shape of `init_from`, or of the settings for a vocabulary size without it.

    Raises the errors of `read_config`, and `ValueError` for LoRA without a model to start from."""
    if config.init_from is None:
        if config.lora:
            raise ValueError(NEEDS_MODEL)
        return configured_shape(config, vocab_size)
    shape = read_config(config.init_from, reason="--lora" if config.lora else None)
    check_loaded(config, shape)
    return shape


def planned_model(config: TrainConfig, shape: ModelConfig) -> LanguageModel:
    """Returns the model of a run, on the meta device. Raises the errors of `add_lora`."""
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
    """Returns the bytes of the activations of `size` sequences at the peak, without compilation: what autograd saves for the
    backward, and the logits and their gradients, at most `at_once` of them.

    With `checkpoint_activations` one block saves everything, and the others their input in fp32.
    LoRA saves about the same, with dropout half as much again (measured on a small GPT-2).
    """
    width = 2 if precision in AUTOCAST_DTYPES else 4
    tokens = size * config.tokens_per_sequence
    layers = 1 if config.checkpoint_activations else shape.n_layer
    saved = saved_bytes(
        shape.with_depth(layers), precision, size * config.rows, config.tokens_per_row
    )
    saved += (shape.n_layer - layers) * tokens * shape.n_embd * 4
    saved += saved // 2 if config.lora_dropout else 0
    logits = tokens * shape.padded_vocab_size
    if logits <= LOGITS_AT_ONCE or not shape.has_plain_head:
        return saved + logits * (4 if width == 4 else 4 + 2)
    weight = shape.padded_vocab_size * shape.n_embd  # a copy, and the gradient of one chunk
    return saved + (min(logits, at_once or LOGITS_AT_ONCE) + 2 * weight) * width


def saved_bytes(shape: ModelConfig, precision: str, batch: int, length: int) -> int:
    """Returns the bytes that autograd saves of (batch, length) tokens, without the parameters, measured on fake tensors.

    Classes of `transformers` that fake tensors cannot run, such as mixtures of experts, are estimated: 34 bytes per layer, token
    and channel in half precision, without attention scores (Korthikanti et al., 2022, arXiv:2205.05198, equation 2).
    """
    seen: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no id is reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage
        return tensor

    dtype = AUTOCAST_DTYPES.get(precision)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = shape.build()
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        # It reports what it cannot run, with a traceback.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            with hooks, torch.autocast("cpu", dtype, enabled=dtype is not None):
                model(tokens, tokens)
        except RuntimeError:
            per_value = 34 if dtype is not None else 68
            return per_value * shape.n_layer * batch * length * shape.n_embd
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return sum(storage.nbytes() for key, storage in seen.items() if key not in own)


def fitting_batch_size(
    config: TrainConfig,
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Callable[[torch.nn.Module, Batch], Any],
    packed: bool = False,
) -> int:
    """Returns the largest micro-batch that divides the batch evenly and fits on every rank.

    The memory is estimated. On a GPU the size is then tried: the objective and its backward with random tokens, with gradients,
    memory reserved for the optimizer state, and a `MARGIN`; if it does not fit, the next smaller one is. On a CPU, or with a
    sharded model, running out of memory cannot be caught, and the estimate decides. Parameters and random states do not
    change. `packed` says that batches have `documents`.

    Raises `ValueError` if not even one sequence fits, and what `batch_schedule` raises.
    """
    device = accelerator.device
    processes = accelerator.num_processes
    plain = unwrap(accelerator, model)
    length = config.tokens_per_sequence
    shards = shard_count(processes, accelerator.is_fsdp2)
    state = state_bytes(config, plain, shards)

    def needed(size: int) -> int:
        at_once = kernels.choices.logits_at_once
        activations = activation_bytes(
            config, plain.config, accelerator.mixed_precision, size, at_once
        )
        return state["gradients"] + state["optimizer"] + activations  # the weights are there

    each = config.batch_schedule(processes).full // processes
    sizes = [size for size in range(1, each + 1) if each % size == 0]
    # On a CPU the processes share the machine's memory.
    free = free_memory(device) // (1 if device.type == "cuda" else processes)
    fitting = sizes[: bisect_left(sizes, FREE * free, key=needed)]
    best = fitting[-1] if fitting else 0
    if reports_out_of_memory(device) and not accelerator.is_fsdp2:
        tried = reversed(fitting or sizes[:1])
        best = next(
            (n for n in tried if trial_fits(accelerator, model, objective, (n, length), packed)), 0
        )
    best = int(accelerator.gather(torch.tensor([best], device=device)).min())
    if not best:
        raise ValueError(
            "not even a micro-batch of one sequence fits into memory: lower --sequence_length, fine-tune by --lora 16, or shard "
            f"the model (launch config 8xa100_fsdp2.yaml); {in_words(state)}"
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
        reserve = [torch.empty_like(p) for p in parameters for _ in range(2)]
        margin = int(MARGIN * total_memory(device))
        reserve.append(torch.empty(margin, dtype=torch.uint8, device=device))
        for parameter in parameters:  # from the second micro-batch on they are there
            parameter.grad = torch.zeros_like(parameter)
        tokens = torch.randint(0, 100, shape, device=device)
        batch = Batch(tokens, tokens, documents=tokens * 0 if packed else None)
        with accelerator.no_sync(model):
            found = objective(model, batch)
            loss = found[0] if isinstance(found, tuple) else found
            loss.backward()
        del reserve
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        for parameter in parameters:
            parameter.grad = None
        # Otherwise the trials would count towards Dynamo's recompile limit, after which it runs new sizes uncompiled.
        torch.compiler.reset()
        release_memory()
