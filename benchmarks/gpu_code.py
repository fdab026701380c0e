"""Counts, without a GPU, the bytes that a training step reads and writes on an H100.

    make test-gpu-code

Dynamo and autograd trace the step on a CPU, with tensors without memory. Inductor then gets the
graphs as if they were an H100's, up to the list of kernels; nothing runs. A kernel reads and writes
what its loops visit of a tensor, at most the whole tensor; what stays in the kernel is free. So a
gather, such as the embedding, counts its rows. Bytes per layer are from 2 and 4 layers.

The loss is an operator that the compiler does not see into: each of its operations counts inputs
and outputs. The softmax's kernel reads the logits twice and writes them once.

The exit code is 1 if a figure is above its limit in `gpu_code_limits.json`, which `--record`
writes: the figures plus 2%. The limits are for the torch of `constraints.txt`.
"""

import argparse
import json
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gpt2_accel import kernels
from gpt2_accel.config import TrainConfig
from gpt2_accel.kernels import cross_entropy
from gpt2_accel.models import config_class
from gpt2_accel.runtime.device import logits_at_once
from gpt2_accel.runtime.files import write_json

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
LIMITS = Path(__file__).with_name("gpu_code_limits.json")
MARGIN = 1.02
BATCH, LENGTH, VOCABULARY, LAYERS = 16, 1024, 50257, 12
TRITON, EXTERN = "elementwise and norms", "products and attention"
GPU = torch.device("cuda", 0)
MEMORY = 80e9
H100 = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)
STEPS = {
    "gpt2": ("gpt2", torch.float32),
    "gpt2, residual stream in bf16": ("gpt2", torch.bfloat16),
    "qwen3": ("qwen3", torch.float32),
    "nanochat": ("nanochat", torch.float32),
}


class LossBytes(TorchDispatchMode):
    """Counts the bytes of the operations in its context, products apart, in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name.startswith(("empty", "new_empty")):
            return outputs
        tensors = tree_leaves((args, outputs))
        if name.startswith("new_") or name.endswith("_like"):
            tensors = [outputs]
        elif name == "index":
            tensors = [outputs, outputs]
        elif name == "index_put_":
            tensors = [args[2], args[2]]
        moved = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        self.counts["products" if name in ("mm", "addmm", "addmm_") else "elementwise"] += moved
        return outputs

    def softmax(self, *_: Any) -> Callable:
        """Stands for `gradient_function`: two reads and one write of the logits."""

        def gradient_(logits: torch.Tensor, factor: torch.Tensor, _: Any) -> torch.Tensor:
            self.counts["elementwise"] += 3 * logits.nbytes
            return torch.empty_like(factor)

        return gradient_


def loss_bytes(arguments: Sequence[Any]) -> Counter[str]:
    """Returns the bytes of `chunked_cross_entropy`, whose tensors need no memory."""
    meta = tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), arguments
    )
    with (
        LossBytes() as loss,
        patch.object(cross_entropy, "gradient_function", loss.softmax),
        patch.object(torch, "autocast", lambda *_, **__: nullcontext()),  # not for "meta"
    ):
        cross_entropy.chunked_cross_entropy._init_fn(*meta)
    return loss.counts


def kernel_bytes(kernel: BaseSchedulerNode) -> int:
    """Returns the bytes that a kernel of the graph in `V.graph` reads and writes."""
    parts = kernel.get_nodes()
    names = {part.get_name() for part in parts}
    made = {buffer.get_name(): buffer for part in parts for buffer in part.get_outputs()}
    passed_on = {
        name
        for name, buffer in made.items()
        if all(user.get_name() in names for user in buffer.users)
    }
    # Generated kernels have a StarDep only for the order of writes, extern ones for all tensors.
    kind = StarDep if kernel.is_extern() else MemoryDep
    reads = {dep for part in parts for dep in part.read_writes.reads if dep.name not in made}
    writes = {dep for part in parts for dep in part.read_writes.writes}
    total = 0
    for deps in (reads, writes):
        moved: Counter[str] = Counter()
        for dep in deps:
            if isinstance(dep, kind) and dep.name not in passed_on:
                moved[dep.name] += visited(dep)
        total += sum(min(moved[name], StarDep(name).numbytes_hint()) for name in moved)
    return total


def visited(dep: MemoryDep | StarDep) -> int:
    """Returns the bytes of a tensor that a kernel's loops visit, repetitions included."""
    if isinstance(dep, StarDep):
        return dep.numbytes_hint()
    size = math.prod(map(int, dep.size)) * V.graph.get_dtype(dep.name).itemsize
    return 2 * size if dep.mode == "atomic_add" else size  # it reads, too


class Step:
    """A training step of a model, compiled for an H100 that is not there.

    `counts` has bytes by direction and kind of kernel and of the accumulation of gradients, graphs
    and kernels; `loss` are the arguments of the loss's operator.
    """

    def __init__(self, architecture: str, residual_dtype: torch.dtype, n_layer: int):
        self.counts: Counter[str] = Counter()
        self.loss: Sequence[Any] = ()
        torch.compiler.reset()
        settings = TrainConfig(architecture=architecture)
        shape = config_class(architecture).from_settings(settings, VOCABULARY)
        with FakeTensorMode(), patch.object(F, "scaled_dot_product_attention", flash_attention):
            model = shape.with_depth(n_layer).build()
            model.residual_dtype = residual_dtype
            # Two reads and a write, in fp32.
            self.counts["accumulation"] = 3 * sum(p.nbytes for p in model.parameters())
            tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                torch.compile(model, backend=self.compile)(tokens, tokens)

    def compile(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """The backend of `torch.compile`."""
        return compile_fx.compile_fx(gm, inputs, inner_compile=self.compile_graph)

    def compile_graph(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compiles a forward or backward graph; returns a function with outputs of its shapes."""
        mode: Any = detect_fake_mode(inputs)
        outputs: Any = torch.fx.map_arg(
            gm.graph.output_node().args[0], lambda node: node.meta["val"]
        )
        direction = "backward" if options.get("is_backward") else "forward"
        self.counts["graphs"] += 1

        def on_gpu(t: torch.Tensor) -> torch.Tensor:
            with mode:
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=GPU)

        def move(gm: torch.fx.GraphModule, *_: Any) -> FakeTensorMode:
            for node in gm.graph.nodes:
                if node.target is torch.ops.gpt2_accel.linear_cross_entropy.default:
                    self.loss = torch.fx.map_arg(node.args, lambda node: node.meta["val"])
                if node.kwargs.get("device"):
                    node.update_kwarg("device", GPU)
                if "val" in node.meta:
                    node.meta["val"] = tree_map_only(torch.Tensor, on_gpu, node.meta["val"])
            return mode

        def count(graph: GraphLowering) -> types.SimpleNamespace:
            graph.init_wrapper_code()
            graph._update_scheduler()
            for kernel in graph.scheduler.nodes:
                kind = EXTERN if kernel.is_extern() else TRITON
                self.counts[f"{direction}, {kind}"] += kernel_bytes(kernel)
                nothing = isinstance(kernel, NopKernelSchedulerNode)
                self.counts["kernels"] += not (nothing or isinstance(kernel.node, MultiOutput))
            return types.SimpleNamespace(call=print)

        with (
            patch.multiple(
                torch.cuda,
                is_available=lambda: True,
                current_device=lambda: 0,
                get_rng_state=lambda: torch.zeros(16, dtype=torch.uint8),
                set_rng_state=lambda _: None,
                _exchange_device=lambda _: 0,
                _maybe_exchange_device=lambda _: 0,
            ),
            patch.object(DeviceProperties, "create", lambda _: H100),
            patch("torch._inductor.scheduler.has_triton", lambda *_: True),
            patch.object(compile_fx, "_check_triton_bf16_support"),
            patch.object(compile_fx, "fake_tensor_prop", move),
            patch.object(GraphLowering, "compile_to_module", count),
        ):
            compile_fx.compile_fx_inner(gm, tree_map_only(torch.Tensor, on_gpu, inputs), **options)

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return list(outputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, **_: Any
) -> torch.Tensor:
    """Stands for torch's attention, which chooses another kernel on a CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def figures(architecture: str, residual_dtype: torch.dtype) -> dict[str, float]:
    """Returns the figures of a training step, bytes in MB."""
    small, large = (Step(architecture, residual_dtype, n_layer) for n_layer in (2, 4))
    layer = {name: (count - small.counts[name]) / 2 for name, count in large.counts.items()}
    result: dict[str, float] = {}
    outside = 0.0
    for kind in (TRITON, EXTERN):
        for direction in ("forward", "backward"):
            name = f"{direction}, {kind}"
            result[f"{name}, MB per layer"] = layer[name] / 1e6
            if kind == TRITON:
                outside += small.counts[name] - 2 * layer[name]
    result[f"{TRITON} outside the layers, MB"] = outside / 1e6
    for kind, moved in sorted(loss_bytes(large.loss).items()):
        result[f"loss, {kind}, MB"] = moved / 1e6
    whole = {name: small.counts[name] + (LAYERS - 2) * layer[name] for name in layer}
    result["accumulation of gradients, MB"] = whole["accumulation"] / 1e6
    return result | {name: whole[name] for name in ("graphs", "kernels")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the bytes of a training step on an H100.")
    parser.add_argument("--record", action="store_true", help=f"write {LIMITS.name}")
    record = parser.parse_args().record
    version = torch.__version__.partition("+")[0]
    if f"torch=={version}\n" not in CONSTRAINTS.read_text():
        print(f"This is torch {version}, but the limits are for the one of {CONSTRAINTS.name}.")
    torch._inductor.config.force_disable_caches = True
    torch._functorch.config.force_non_lazy_backward_lowering = True
    kernels.choose(logits_at_once=logits_at_once(MEMORY, "bf16"), fuse=True)
    limits = {} if record else json.loads(LIMITS.read_text(encoding="utf-8"))
    above = []
    for step, arguments in STEPS.items():
        counted = figures(*arguments)
        if record:
            limits[step] = {name: int(value * MARGIN) for name, value in counted.items()}
        print(f"\n{step}")
        for name, value in counted.items():
            limit = limits[step][name]
            print(f"  {name:52}{value:8,.0f}, at most {limit:,}", flush=True)
            if value > limit:
                above.append(f"{step}: {name}: {value:,.0f} is above the limit, {limit:,}.")
    if record:
        write_json(LIMITS, limits)
    sys.exit("\n".join(above) or None)


if __name__ == "__main__":
    main()
