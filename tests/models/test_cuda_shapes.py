"""What runs without gradients, on fake CUDA tensors: every operation has its shapes, dtypes and device, without a GPU."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from gpt2_accel import GPTConfig, kernels
from gpt2_accel.evals.likelihood import Question, token_nats
from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.kernels.cross_entropy import chunked_cross_entropy
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.optim import build_optimizer

GPU = torch.device("cuda", 0)
SHAPE = {"n_positions": 256, "n_layer": 2, "n_head": 2, "n_embd": 32}
KINDS = [
    partial(GPTConfig, 300, **SHAPE),
    partial(LlamaConfig, 300, **SHAPE, n_kv_head=1, head_dim=16, n_inner=64),
    partial(Qwen3Config, 300, **SHAPE, n_kv_head=1, head_dim=16, n_inner=64),
]


OPERATORS = {
    torch.Tensor.__invert__: torch.ops.aten.bitwise_not,
    torch.Tensor.copy_: torch.ops.aten.copy_,
    torch.Tensor.contiguous: torch.ops.aten.contiguous,
    torch.Tensor.pin_memory: torch.ops.aten.clone,
}


def cross_entropy(logits, *args, **kwargs):
    """`F.cross_entropy` of contiguous logits; it would call `contiguous` inside."""
    return torch.nn.functional.cross_entropy(torch.ops.aten.clone(logits), *args, **kwargs)


OPERATORS[torch.nn.functional.cross_entropy] = cross_entropy


class Operators(TorchFunctionMode):
    """Replaces methods of tensors that ask for a CUDA device, which a build for CPUs does not have, by operators."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return index(*args)
        if function is torch.Tensor.__setitem__:
            x, where, value = args
            if any(isinstance(part, torch.Tensor) for part in in_order(where)):
                return x.index_put_(in_order(where), value)
            part = index(x, where)
            return (
                part.fill_(value)
                if isinstance(value, int | float)
                else torch.ops.aten.copy_(part, value)
            )
        return OPERATORS.get(function, function)(*args, **(kwargs or {}))


def in_order(where):
    return where if isinstance(where, tuple) else (where,)


def index(x, where):
    """Returns `x[where]`."""
    where = in_order(where)
    if Ellipsis in [part for part in where if not isinstance(part, torch.Tensor)]:
        place = where.index(Ellipsis)
        missing = x.ndim - sum(part is not None for part in where) + 1
        where = (*where[:place], *[slice(None)] * missing, *where[place + 1 :])
    dim, tensors = 0, []
    for part in where:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            if part != slice(None):
                x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, torch.Tensor):
            tensors += [None] * (dim - len(tensors)) + [part]
        else:
            x = x.select(dim, part)
            continue
        dim += 1
    return torch.ops.aten.index(x, tensors) if tensors else x


@pytest.fixture(autouse=True)
def fake():
    with FakeTensorMode(allow_non_fake_inputs=True), Operators(), torch.no_grad():
        yield


def build(kind, dtype=torch.float32):
    """Returns a model on the GPU. Its weights cannot be initialized there without a GPU, nor moved."""
    model = kind().build()
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                moved = torch.empty_like(weight, device=GPU, dtype=dtype)
                module._parameters[name] = torch.nn.Parameter(moved)
    return model


def tokens(rows=4, length=256):
    return torch.zeros(rows, length, dtype=torch.int64, device=GPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(), ("CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH")])
@pytest.mark.parametrize("mask", [None, "dense", "blocks"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_forward(kind, order, mask, dtype, monkeypatch):
    if order and torch.backends.cuda.is_built() and not torch.cuda.is_available():
        pytest.skip("a CUDA build of torch asks the GPU which attention kernels it has")
    monkeypatch.setattr("gpt2_accel.kernels.block_attention.compiled_attention", lambda: without)
    model = build(kind)
    model.separator = None if mask is None else 7
    chosen = kernels.chosen(sdpa_order=order, block_masks=mask == "blocks")
    with chosen, torch.autocast("cuda", dtype, enabled=dtype is not None):
        logits, loss = model(tokens()), model(tokens(), tokens())
        each = model(tokens(), tokens(), reduction="none")
    assert logits.shape == (4, 256, 300) and logits.device == loss.device == GPU
    assert loss.shape == () and each.shape == (4, 256)
    assert loss.dtype == each.dtype == torch.float32


def without(q, k, v, block_mask, enable_gqa):
    """Stands for compiled FlexAttention, which is not traced on fake tensors."""
    assert block_mask.kv_num_blocks.device == GPU and block_mask.shape == (4, 1, 256, 256)
    return torch.empty_like(q)


@pytest.mark.parametrize("rows", [1334, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inside_of_the_chunked_loss(rows, dtype):
    x = torch.zeros(4000, 32, dtype=dtype, device=GPU)
    weight = torch.zeros(50304, 32, device=GPU)
    targets = torch.zeros(4000, dtype=torch.int64, device=GPU)
    total, grad_x, grad_w = chunked_cross_entropy._init_fn(x, weight, targets, 50257, rows, False)
    assert {part.device for part in (total, grad_x, grad_w)} == {GPU}
    assert {part.dtype for part in (total, grad_x, grad_w)} == {torch.float32}
    assert grad_x.shape == x.shape and grad_w.shape == weight.shape


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_steps(name):
    model = build(KINDS[0])
    optimizer = build_optimizer(model, name, lr=1e-3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    states = [state for state in optimizer.state.values()]
    assert {part.device for state in states for part in state.values() if part.ndim} == {GPU}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding(kind, dtype):
    model = build(kind, dtype).eval()
    cache = KVCache(model, [[1, 2, 3], [4, 5]], 16)
    for _ in range(3):
        cache.append(torch.zeros(2, 1, dtype=torch.int64, device=GPU))
    assert cache.logits.shape == (2, 300) and cache.logits.device == GPU


def test_scoring():
    model = build(KINDS[0]).eval()
    rows = [Question([1, 2, 3], [[4], [5, 6]]), Question([1], [[2, 3]])]
    for batch in (rows, rows[1:]):  # with a mask, and without
        assert token_nats(model, batch).device == GPU
