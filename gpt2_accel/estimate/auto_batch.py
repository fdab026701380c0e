"""Finds the largest micro-batch that fits into a device's memory."""

import gc
from bisect import bisect_left

import torch
from accelerate import Accelerator

from gpt2_accel import kernels
from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.config import TrainConfig
from gpt2_accel.device import (
    empty_cache,
    free_memory,
    is_sharded,
    reports_out_of_memory,
    total_memory,
)
from gpt2_accel.estimate.memory import memory_by_part

MARGIN = 0.03  # of the device's memory, which a trial leaves free: allocations vary between updates


def fitting_batch_size(
    config: TrainConfig, accelerator: Accelerator, model: torch.nn.Module, packed: bool = False
) -> int:
    """Returns the largest micro-batch that divides the batch evenly and fits on every rank.

    The memory is estimated. On a GPU the size is then tried: forward and backward with random tokens, with gradients,
    memory reserved for the optimizer state, and a `MARGIN`; if it does not fit, the next smaller one is. On a CPU, or with a
    sharded model, running out of memory cannot be caught, and the estimate decides. Parameters and random states do not
    change. `packed` says that batches have `documents`.

    Raises `ValueError` if not even one sequence fits.
    """
    per_rank, rest = divmod(
        config.total_batch_size, config.tokens_per_sequence * accelerator.num_processes
    )
    if rest or not per_rank:
        return 1  # the check of the batch sizes raises the error
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    run = config, accelerator, model
    fitting = sizes[: bisect_left(sizes, True, key=lambda size: not estimate_fits(*run, size))]
    best = fitting[-1] if fitting else 0
    if reports_out_of_memory(accelerator.device) and not is_sharded(model):
        tried = reversed(fitting or sizes[:1])
        best = next((size for size in tried if trial_fits(*run, size, packed)), 0)
    best = int(accelerator.gather(torch.tensor([best], device=accelerator.device)).min())
    if not best:
        raise ValueError(
            "not even a micro-batch of one sequence fits into memory: lower --sequence_length, or shard "
            "the model (launch config 8xa100_fsdp2.yaml)"
        )
    accelerator.print(f"micro_batch_size {best}: the largest that fits into memory")
    return best


def trial_fits(
    config: TrainConfig, accelerator: Accelerator, model: torch.nn.Module, size: int, packed: bool
) -> bool:
    """Whether forward and backward of a micro-batch of `size` sequences fit into memory."""
    device = accelerator.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        reserve = [torch.empty_like(p) for p in parameters for _ in range(2)]
        margin = int(MARGIN * total_memory(device))
        reserve.append(torch.empty(margin, dtype=torch.uint8, device=device))
        for parameter in parameters:  # from the second micro-batch on they are there
            parameter.grad = torch.zeros_like(parameter)
        tokens = torch.randint(0, 100, (size, config.tokens_per_sequence), device=device)
        with accelerator.no_sync(model):
            model(tokens, tokens, documents=tokens * 0 if packed else None).backward()
        del reserve
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        for parameter in parameters:
            parameter.grad = None
        # Otherwise the trials would count towards Dynamo's recompile limit, after which it runs new sizes uncompiled.
        torch.compiler.reset()
        gc.collect()
        empty_cache()


def estimate_fits(
    config: TrainConfig, accelerator: Accelerator, model: torch.nn.Module, size: int
) -> bool:
    """Whether the estimated memory of a micro-batch of `size` sequences is below 90% of the free memory."""
    shape = unwrap(accelerator, model).config
    parts = memory_by_part(config, shape, accelerator, size, kernels.choices.logits_at_once)
    needed = sum(parts.values()) - parts["weights"]  # which are there
    free = free_memory(accelerator.device)
    if accelerator.device.type != "cuda":  # the processes share the machine's memory
        free //= accelerator.num_processes
    return needed < 0.9 * free
