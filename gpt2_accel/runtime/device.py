"""Device capabilities: bf16 units, a compiler, peak FLOP/s, memory, whether a tensor is sharded.

The environment variable `GPT2_ACCEL_DEVICE` overrides them, for tests and for machines that report
wrong values. It is a JSON object of function names and return values, such as
`{"has_bf16": false, "free_memory": 1000000000}`.
"""

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import psutil
import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OVERRIDES = "GPT2_ACCEL_DEVICE"


class Gpu(NamedTuple):
    """Dense FLOP/s in bf16 with fp32 sums (V100 and T4: fp16), and bytes of memory.

    Data sheets often quote twice as much: for sparse matrices, and for GeForce fp16 sums.
    """

    peak_flops: float
    memory: float


# By words of the device's name, the longer first. If the name does not give the memory, it is that
# of the largest version. The source is in the comment: a page below nvidia.com/en-us/data-center,
# or another document of NVIDIA.
GPUS = {
    "B200": Gpu(2250e12, 180e9),  # hgx: 36 PFLOPS sparse in 8 GPUs
    "H200": Gpu(989e12, 141e9),  # h200: 1,979 TFLOPS sparse
    "H100 PCIe": Gpu(756e12, 80e9),  # H100 data sheet of 2023: 1,513 TFLOPS sparse
    "H100": Gpu(989e12, 80e9),  # h100: 1,979 TFLOPS sparse
    "A100 40GB": Gpu(312e12, 40e9),  # a100
    "A100": Gpu(312e12, 80e9),  # a100
    "L40S": Gpu(362e12, 48e9),  # l40s
    "L4": Gpu(121e12, 24e9),  # l4: 242 TFLOPS sparse
    "A10G": Gpu(70e12, 24e9),  # A10G data sheet of NVIDIA and AWS, 2022
    "A10": Gpu(125e12, 24e9),  # products/a10-gpu
    "V100": Gpu(125e12, 32e9),  # v100
    "T4": Gpu(65e12, 16e9),  # tesla-t4
    "RTX 5090": Gpu(209.5e12, 32e9),  # "NVIDIA RTX Blackwell GPU Architecture", appendix
    "RTX 4090": Gpu(165e12, 24e9),  # "NVIDIA Ada GPU Architecture", appendix
    "RTX 3090": Gpu(71e12, 24e9),  # "NVIDIA Ampere GA102 GPU Architecture", appendix
}
# The dtypes of mixed precision, by Accelerate's names.
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def overridable(question: Callable) -> Callable:
    """Decorates a function whose return value `GPT2_ACCEL_DEVICE` can override."""

    @functools.wraps(question)
    def answer(*args: Any, **kwargs: Any) -> Any:
        overrides = json.loads(os.environ.get(OVERRIDES, "{}"))
        name = question.__name__
        return overrides[name] if name in overrides else question(*args, **kwargs)

    return answer


def best_device() -> torch.device:
    """Returns the CUDA GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def launch_device() -> torch.device:
    """Returns the device of a launch without flags: a GPU if torch can use one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@overridable
def accelerator_count() -> int:
    """Returns the number of GPUs that this process sees. It may start their driver."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def device_name(device: torch.device) -> str:
    """Returns the model of a CUDA device, such as `NVIDIA H100 80GB HBM3`, else `cpu` or `mps`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@overridable
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU, such as (9, 0); (0, 0) for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


# Precision and compilation


@overridable
def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices in hardware.

    A CPU needs AVX512-BF16 or AMX. `ATEN_CPU_CAPABILITY=avx2` turns both off.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        allowed = "AVX512" in torch.backends.cpu.get_cpu_capability()
        return allowed and torch.cpu._is_avx512_bf16_supported()
    return True


def precision_name(precision: str) -> str:
    """Returns the dtype's name of Accelerate's `precision`: `fp32` for "no", else the same."""
    return "fp32" if precision == "no" else precision


@overridable
def has_cpp_compiler() -> bool:
    """Whether inductor finds a C++ compiler: `CXX`, else g++ or clang++."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return any(shutil.which(name) for name in names)


def inductor_problem(device: torch.device) -> str | None:
    """Returns why inductor cannot compile for the device, or None if it can."""
    if device.type == "cpu" and not has_cpp_compiler():
        return "no C++ compiler found (install g++ or set CXX)"
    if device.type == "mps":
        return "inductor's support of Apple GPUs is not complete"
    return None


# Speed


@overridable
def peak_flops(name: str) -> float | None:
    """Returns the published peak of one device in FLOP/s, or None if it is unknown.

    `name` is what `device_name` returns. A laptop's GPU, a "D" or NVL version and a part of a GPU
    (MIG) are slower than their namesakes.
    """
    if re.search(r"\b(Laptop|MIG|D)\b", name):
        return None
    for words, gpu in GPUS.items():
        if re.search(rf"\b{words}\b(?! NVL)", name):
            return gpu.peak_flops
    return None


def attention_order(device: torch.device, deterministic: bool) -> tuple[str, ...]:
    """Returns the attention kernels of the device, the fastest first: names in `SDPBackend`.

    cuDNN's takes half the time of flash attention on Hopper, and more time on Ampere
    (huggingface/transformers#48163). `deterministic` selects kernels with a deterministic backward.
    Empty for devices other than NVIDIA GPUs: torch decides.
    """
    major, _ = compute_capability(device)
    if not major:
        return ()
    allowed = {
        "CUDNN_ATTENTION": major in (9, 10) and not deterministic,
        "FLASH_ATTENTION": major >= 8,
        "EFFICIENT_ATTENTION": not deterministic,
        "MATH": True,
    }
    return tuple(name for name in allowed if allowed[name])


@overridable
def has_block_masks(device: torch.device) -> bool:
    """Whether FlexAttention's compiled kernels run on the device: NVIDIA GPUs from Ampere on."""
    return compute_capability(device)[0] >= 8 and inductor_problem(device) is None


def logits_at_once(memory: float, precision: str) -> int:
    """Returns the number of logits that fit into a sixteenth of `memory` bytes, below 2^31.

    `precision` as in Accelerate. Few large chunks of the loss are faster than many: 36 ms in one
    chunk, 40 in 8, 57 in 64 (pytorch/pytorch#124480).
    """
    width = 2 if precision in AUTOCAST_DTYPES else 4
    # A kernel computes the addresses of more elements in 64 bits, which is slower.
    return min(int(memory / 16 / width), 2**31 - 1)


def end_of_work(device: torch.device) -> torch.Event | None:
    """Returns an event after the work queued on a CUDA device so far, None for other devices."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_instructions() -> str:
    """Returns the CPU's instruction sets for compiled code, and whether it has bf16 and AMX."""
    units = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()
    return f"{torch.backends.cpu.get_cpu_capability()} {units}"


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the random generators of the CPU and of `device`.

    `torch.manual_seed` also formats a stack trace for each unused kind of device: up to 0.4 ms.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moves a tensor from the CPU; for CUDA through pinned memory, so the host does not wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# Memory


@overridable
def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a CUDA device, or of the machine for other devices."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


@overridable
def reports_out_of_memory(device: torch.device) -> bool:
    """Whether too large an allocation raises `OutOfMemoryError`; on a CPU it ends the process."""
    return device.type == "cuda"


@overridable
def total_memory(device: torch.device) -> int:
    """Returns the memory of a CUDA device, otherwise of the machine, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def memory_gb() -> float:
    """Returns the memory of this process in GB (1e9 bytes).

    It is torch's peak reservation on the current CUDA device, or the resident set size if the
    process uses none.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved() / 1e9
    return psutil.Process().memory_info().rss / 1e9


# Sharding


def is_shard(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether the tensor is a `DTensor`."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, gathered if it is sharded; all ranks must then call it."""
    return tensor.full_tensor() if is_shard(tensor) else tensor
