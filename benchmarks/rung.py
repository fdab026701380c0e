"""The process that measures one rung of the speed ladder: a training step of GPT-2 in a given `Variant`.

`ladder.py` starts it with a job as JSON; it prints the result as a line of JSON. Other jobs measure attention alone, or
describe the device.
"""

import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from reference_model import PlainLoss, slow_gpt, standard_attention
from timing import peak_memory, seconds_each, this_device
from torch import nn

from gpt2_accel.device import inductor_problem, matmul_flops, precision_problem
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.optim import build_optimizer
from gpt2_accel.runtime.signals import end_with_parent

TOKENS = 50257  # GPT-2's vocabulary without padding


@dataclass
class Workload:
    """The sizes of the measurement, equal on all rungs. `attention` is (B, H, T, D) of attention alone."""

    size: str
    micro_batch_size: int
    large_micro_batch_size: int
    sequence_length: int
    accumulation: int
    steps: int
    warmup: int
    attention: list[int]


@dataclass(frozen=True)
class Variant:
    """The options of a rung; the defaults are the first rung. `precision` is "no", "fp16" or "bf16"."""

    stored_mask: bool = True
    tf32: bool = False
    fused: bool = False
    prefetch: bool = False
    precision: str = "no"
    hand_norm_gelu: bool = True
    hand_attention: bool = True
    compile: bool = False
    bias: bool = True
    vocab_size: int = TOKENS
    chunked_loss: bool = False
    large_batch: bool = False
    accumulate: bool = False
    ddp: bool = False


def describe_device() -> dict:
    """Returns the device's type and name, the rungs it cannot run, and its matrix-product rates in FLOP/s."""
    device = this_device()
    threads = torch.get_num_threads()
    name = f"{device.type.upper()} with {threads} thread{'s' * (threads > 1)}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    dtypes = [torch.float32]
    if not precision_problem(device, "bf16"):
        dtypes.append(torch.bfloat16)
    if device.type == "cuda":
        dtypes.append(torch.float16)
    return {
        "type": device.type,
        "name": name,
        "devices": max(torch.accelerator.device_count(), 1),
        "lacking": lacking(device),
        "flops": {
            str(dtype).removeprefix("torch."): matmul_flops(
                device, dtype, 2048 if device.type == "cpu" else 8192, repeats=10
            )
            for dtype in dtypes
        },
    }


def lacking(device: torch.device) -> dict[str, str]:
    """Returns the rungs that `device` cannot run, name -> reason."""
    reasons = {"bf16": precision_problem(device, "bf16") and "only emulated"}
    reasons["compile"] = inductor_problem(device)
    if device.type != "cuda":
        reasons |= dict.fromkeys(("TF32", "pinned, prefetched data", "fp16"), "CUDA only")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reasons["TF32"] = "needs compute capability 8.0"
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        reasons["DDP over all devices"] = "needs several GPUs"
    return {name: reason for name, reason in reasons.items() if reason}


def measure_step(workload: Workload, variant: Variant) -> dict:
    """Returns the median time of a step in seconds, its tokens on all devices, the loss of the last step in nats, and
    the peak memory of this process in bytes."""
    if variant.ddp:
        if torch.accelerator.is_available():  # gloo on a CPU, for the tests
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group()
    device, devices = this_device(), int(os.environ["WORLD_SIZE"]) if variant.ddp else 1
    if variant.tf32:
        torch.set_float32_matmul_precision("high")
    batch_size = (
        workload.large_micro_batch_size if variant.large_batch else workload.micro_batch_size
    )
    accumulation = workload.accumulation if variant.accumulate else 1
    torch.manual_seed(1337)
    model = build_model(workload, variant).to(device)
    torch.manual_seed(1337)  # equal tokens on all rungs
    step = build_step(
        wrap(model, variant),
        optimizer_of(model, variant),
        Batches(batch_size, workload.sequence_length, device, variant.prefetch),
        accumulation,
        variant.precision,
    )
    losses: list[torch.Tensor] = []
    seconds = seconds_each(
        lambda: losses.append(step()), device, warmup=workload.warmup, repeats=workload.steps
    )
    return {
        "seconds": statistics.median(seconds),
        "tokens": batch_size * workload.sequence_length * accumulation * devices,
        "loss": losses[-1].item(),
        "peak_memory": peak_memory(device),
    }


def ladder_config(workload: Workload, variant: Variant) -> GPTConfig:
    """Returns the model config of a rung."""
    options = {"bias": variant.bias, "vocab_size": variant.vocab_size}
    options["n_positions"] = workload.sequence_length
    if workload.size == "tiny":
        return GPTConfig(n_layer=1, n_head=2, n_embd=32, **options)
    return GPTConfig.from_name(workload.size, **options)


def build_model(workload: Workload, variant: Variant) -> nn.Module:
    """Builds a module that maps (input_ids, targets), both (B, T), to the loss."""
    config = ladder_config(workload, variant)
    if variant.hand_attention:
        switches = {"stored_mask": variant.stored_mask, "hand_norm_gelu": variant.hand_norm_gelu}
        return PlainLoss(slow_gpt(config, **switches))
    return GPT(config) if variant.chunked_loss else PlainLoss(GPT(config))


def wrap(model: nn.Module, variant: Variant) -> nn.Module:
    """Applies DDP, then compilation, in Accelerate's order."""
    if variant.ddp:
        model = nn.parallel.DistributedDataParallel(model)
    return torch.compile(model) if variant.compile else model


def optimizer_of(model: nn.Module, variant: Variant) -> torch.optim.Optimizer:
    """Builds the toolkit's fused AdamW, or a plain AdamW that updates each tensor with separate operations."""
    if variant.fused:
        return build_optimizer(model, "adamw", lr=6e-4)
    return torch.optim.AdamW(
        model.parameters(), lr=6e-4, weight_decay=0.1, fused=False, foreach=False
    )


class Batches:
    """Random windows of B x T tokens from random tokens in host memory.

    With `ahead`, the next batch is made while the device is busy, and copied from pinned memory.
    """

    def __init__(self, batch_size: int, sequence_length: int, device: torch.device, ahead: bool):
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.device, self.ahead = device, ahead
        self.text = torch.randint(TOKENS, (2**20,), dtype=torch.int32)
        self.upcoming: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next batch on the device: input_ids and targets, (B, T) int64."""
        batch = self.upcoming or self.make()
        self.upcoming = None
        return batch

    def look_ahead(self) -> None:
        """Prefetches the next batch if `ahead`. Call it while the device is busy."""
        if self.ahead:
            self.upcoming = self.make()

    def make(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes a batch as `take` returns it."""
        T = self.sequence_length
        begins = torch.randint(len(self.text) - T, (self.batch_size,)).tolist()
        windows = torch.stack([self.text[begin : begin + T + 1] for begin in begins]).long()
        batch = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if self.ahead:
            return tuple(part.pin_memory().to(self.device, non_blocking=True) for part in batch)
        return tuple(part.to(self.device) for part in batch)


def build_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    accumulation: int,
    precision: str,
) -> Callable[[], torch.Tensor]:
    """Returns a function that makes a step: forward and backward of `accumulation` micro-batches, clipping, update.

    The function returns the loss of the last micro-batch in nats.
    """
    device = batches.device.type
    dtype = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def step() -> torch.Tensor:
        for micro_step in range(accumulation):
            input_ids, targets = batches.take()
            with gradient_exchange(model, last=micro_step == accumulation - 1):
                with torch.autocast(device, dtype, enabled=dtype is not None):
                    loss = model(input_ids, targets)
                scaler.scale(loss / accumulation).backward()
            batches.look_ahead()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def gradient_exchange(model: nn.Module, *, last: bool) -> AbstractContextManager:
    """Returns a context in which DDP reduces the gradients for the last micro-batch only."""
    return model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()


def measure_attention(shape: list[int], kind: str) -> dict:
    """Measures forward and backward of causal attention, (B, H, T, D); `kind` is "standard" or "SDPA".

    Returns the median time in seconds, the peak memory in bytes and the dtype: fp16 on CUDA, otherwise bf16, or fp32
    if the device only emulates bf16.
    """
    device = this_device()
    dtype = torch.float32 if precision_problem(device, "bf16") else torch.bfloat16
    if device.type == "cuda":
        dtype = torch.float16
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def run() -> None:
        if kind == "standard":
            y = standard_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), grad)

    seconds = seconds_each(run, device, warmup=2, repeats=10)
    name = str(dtype).removeprefix("torch.")
    return {
        "seconds": statistics.median(seconds),
        "peak_memory": peak_memory(device),
        "dtype": name,
    }


def main() -> None:
    """Runs the job of the command line and prints the result, on the main process only."""
    end_with_parent(signal.SIGKILL)
    job = json.loads(sys.argv[1])
    if "variant" in job:
        found = measure_step(Workload(**job["workload"]), Variant(**job["variant"]))
    elif "attention" in job:
        found = measure_attention(job["attention"], job["kind"])
    else:
        found = describe_device()
    if not torch.distributed.is_initialized():
        print(json.dumps(found))
        return
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
