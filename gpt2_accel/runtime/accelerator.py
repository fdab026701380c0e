"""Builds the `Accelerator` of a run and checks its processes, device, precision and compilation."""

import ctypes
import math
import os
import time
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config as functorch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    parse_flag_from_env,
)
from torch.nn.parallel import DistributedDataParallel

from gpt2_accel import kernels
from gpt2_accel.runtime.cores import may_have_gpu, missing_gpu, usable_cpus
from gpt2_accel.runtime.device import (
    AUTOCAST_DTYPES,
    attention_order,
    full_tensor,
    has_bf16,
    has_block_masks,
    inductor_problem,
    logits_at_once,
    total_memory,
)
from gpt2_accel.runtime.processes import process_state
from gpt2_accel.runtime.signals import launched

M_TRIM_THRESHOLD = -1  # malloc.h
M_MMAP_THRESHOLD = -3

# Fields of an Accelerate config that are refused: the launcher's environment variable, the allowed
# values, and the fix. All other fields are allowed.
REFUSED = {
    "ACCELERATE_MIXED_PRECISION": ("no bf16 fp16", "use bf16, fp16 or no"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "remove it, --total_batch_size gives it"),
    "ACCELERATE_USE_DEEPSPEED": ("false", "use FSDP2, as 8xa100_fsdp2.yaml does"),
    "ACCELERATE_USE_MEGATRON_LM": ("false", "use FSDP2, as 8xa100_fsdp2.yaml does"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "use --checkpoint_activations instead"),
    "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap no_wrap", "use TRANSFORMER_BASED_WRAP"),
    "FSDP_IGNORED_MODULES": ("none", "remove it"),
    "FSDP_OFFLOAD_PARAMS": ("false", "remove it"),
    "PARALLELISM_CONFIG_CP_SIZE": ("1", "remove it, sequences are not split"),
    "PARALLELISM_CONFIG_SP_SIZE": ("1", "remove it, sequences are not split"),
    "PARALLELISM_CONFIG_TP_SIZE": ("1", "remove it, matrices are not split"),
}


def build_accelerator(deterministic: bool = False) -> Accelerator:
    """Builds the `Accelerator` from Accelerate's config file and environment, and checks both.

    `deterministic` turns on torch's deterministic algorithms.

    Raises `ValueError` if Accelerate does not see all started processes, or if the config is not
    possible or in `REFUSED`.
    """
    for name, (allowed, fix) in REFUSED.items():
        value = os.environ.get(name)
        if value is not None and value.lower() not in allowed.split():
            field = name.removeprefix("ACCELERATE_").lower()
            raise ValueError(f"the Accelerate config has {field} {value}: {fix}")
    # Segments that grow: memory is less fragmented where the shapes of batches vary. torch reads
    # the variable at the first CUDA call.
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
    if not names & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    process_state()  # checks that Accelerate sees all processes
    # DDP's buckets are the gradients, instead of a copy of them.
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    try:
        accelerator = Accelerator(kwargs_handlers=[views])
    except ValueError as error:
        raise ValueError(f"the Accelerate config cannot be used here: {error}") from error
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise ValueError("Accelerate has no fp16 here: use --mixed_precision bf16 or no")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "the Accelerate config shards by FSDP1, with which a run cannot be saved: set "
            "fsdp_version: 2"
        )
    on_cpu = accelerator.device.type == "cpu" and not parse_flag_from_env("ACCELERATE_USE_CPU")
    if on_cpu and (launched() or may_have_gpu()):
        accelerator.print(f"training on the CPU, since {missing_gpu()}")
    if accelerator.mixed_precision == "bf16" and not has_bf16(accelerator.device):
        accelerator.print(
            "this device emulates bf16, slowly: on a CPU take cpu.yaml, on a GPU fp16"
        )
    dynamo = accelerator.state.dynamo_plugin
    compiled = dynamo.backend == DynamoBackend.INDUCTOR
    problem = inductor_problem(accelerator.device)
    if compiled and problem is not None:
        accelerator.print(f"{problem}: running uncompiled")
        dynamo.backend = DynamoBackend.NO
        compiled = False
    configure_backends(accelerator.device, accelerator.mixed_precision, compiled, deterministic)
    return accelerator


def configure_backends(
    device: torch.device, precision: str, compiled: bool, deterministic: bool
) -> None:
    """Configures torch and the kernels for the device; `precision` as in Accelerate."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for fp32 matmuls
        kernels.choose(logits_at_once=logits_at_once(total_memory(device), precision))
    if device.type == "cpu":
        if torch.get_num_threads() > usable_cpus():
            # cpu.yaml sets more threads than there are cores. Only builds with MKL limit them.
            torch.set_num_threads(usable_cpus())
        if kernels.choices.enabled:
            set_memory_policy()
    kernels.choose(
        fuse=compiled,
        sdpa_order=attention_order(device, deterministic),
        block_masks=has_block_masks(device),
    )
    # Inductor reports its choice for few rows, once for each graph.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    # A run compiles for its micro-batch and for the evaluation, and a program may train several
    # runs. Dynamo runs functions beyond the limit, by default 8, uncompiled.
    torch._dynamo.config.recompile_limit = 64


def set_memory_policy() -> None:
    """Sets the memory policy of glibc and the compiler for training on a CPU, for this process.

    By default glibc returns each large block to the system when torch frees it, and each update
    waits for the system to clear new pages: a tenth of its time at 124M. Here glibc keeps blocks of
    up to 1 GiB. The compiler recomputes cheap activations such as GELU in the backward pass instead
    of storing them: 0.8 GiB less at 124M and 4 x 1,024 tokens, in the same time.
    """
    functorch.activation_memory_budget = 0.8
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        if not libc.mallopt(M_MMAP_THRESHOLD, 2**30):
            libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that an older glibc accepts
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def prepare_model(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Calls `accelerator.prepare`, with this package's mixed precision under FSDP2.

    FSDP2 then reduces gradients in fp32 and runs the forward under autocast. By Accelerate's
    defaults gradients, the loss, the norms and the residual stream would be in bf16.
    """
    dtype = None
    if accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        units = getattr(model, "_no_split_modules", None)
        if units:
            plugin.transformer_cls_names_to_wrap = list(units)
        dtype = AUTOCAST_DTYPES.get(accelerator.mixed_precision)
    if dtype is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    prepared, optimizer = accelerator.prepare(model, optimizer)
    ddp = without_compilation(prepared)
    if isinstance(ddp, DistributedDataParallel):
        ddp.require_backward_grad_sync = False  # see `reducing`
    if dtype is not None:
        # Autocast's cache would keep a copy of all weights, which FSDP2 frees after each block.
        autocast = torch.autocast(accelerator.device.type, dtype, cache_enabled=False)
        model.forward = autocast(model.forward)
    return prepared, optimizer


def without_compilation(model: Any) -> Any:
    """Returns the module inside the wrapper of `torch.compile`."""
    return getattr(model, "_orig_mod", model)


def reducing(
    accelerator: Accelerator, model: torch.nn.Module, last: bool
) -> AbstractContextManager:
    """Returns a context for a backward pass, in which gradients are reduced if it is the `last`.

    A forward pass never prepares a reduction, so that it need not know whether it is the last.
    """
    if last:
        return accelerator.trigger_sync_in_backward(without_compilation(model))
    return accelerator.no_sync(model)


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the gradients of a prepared model. Raises `ValueError` if there are none."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    if not found:
        raise ValueError(
            "no weight of the model has a gradient: the loss does not depend on them, or a "
            "callback has removed the gradients"
        )
    return found


def gradient_norm(model: torch.nn.Module) -> torch.Tensor:
    """Returns the norm of the gradients as they are, over all ranks, a scalar in fp32."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients_of(model)]
    return full_tensor(torch.nn.utils.get_total_norm(norms))


def clip_gradients(
    accelerator: Accelerator, model: torch.nn.Module, max_norm: float
) -> torch.Tensor:
    """Clips the gradients to `max_norm`, 0 for never, and returns their norm before.

    `accelerator.clip_grad_norm_` rounds the norms to the dtype of the gradients. Here they are in
    fp32, also if the gradients are in bf16 or fp16.
    """
    limit = max_norm or math.inf
    parameters = list(model.parameters())
    if all(gradient.dtype.itemsize > 2 for gradient in gradients_of(model)):
        return accelerator.clip_grad_norm_(parameters, limit)
    accelerator.unscale_gradients()
    norm = gradient_norm(model)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def close(accelerator: Accelerator) -> None:
    """Ends the trackers and the process group; `process_state` starts another for a next run."""
    accelerator.end_training()
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        # A thread of gloo frees the last collective's tensors slightly later and needs the
        # interpreter for it. If the interpreter has ended by then, the process aborts.
        time.sleep(0.2)
