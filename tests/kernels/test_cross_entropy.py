"""Chunked cross-entropy: values and gradients equal the plain loss."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_accel.kernels import cross_entropy
from gpt2_accel.kernels.cross_entropy import linear_cross_entropy

N, C, V, VOCAB = 37, 16, 256, 250


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 10 * V)


def problem(spread=1.0):
    x = torch.randn(N, C)
    weight = torch.randn(V, C) * spread
    targets = torch.randint(VOCAB, (N,))
    targets[::5] = -100
    return x, weight, targets


def reference(x, weight, targets):
    """Returns loss and gradients in fp64, computed from all logits at once."""
    x, weight = (part.double().requires_grad_() for part in (x, weight))
    loss = F.cross_entropy(x @ weight[:VOCAB].T, targets)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def ours(x, weight, targets, scale=1.0, dtype=None):
    x, weight = (part.clone().requires_grad_() for part in (x, weight))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = linear_cross_entropy(x, weight, targets, vocab_size=VOCAB)
    grads = torch.autograd.grad(loss * scale, (x, weight))
    return loss.detach(), *(grad / scale for grad in grads)


def distance(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


# The tolerance is several rounding errors. A large spread gives probabilities near 0 and 1.
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (None, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_loss_and_gradients_equal_fp64(dtype, tolerance, spread):
    x, weight, targets = problem(spread)
    if dtype == torch.float64:
        found = ours(x.double(), weight.double(), targets)
    else:
        rounded = dtype or torch.float32
        x, weight = x.to(rounded).float(), weight.to(rounded).float()  # the inputs of the products
        found = ours(x, weight, targets, dtype=dtype)
    assert [part.dtype for part in found] == [found[0].dtype] * 3
    for part, expected in zip(found, reference(x, weight, targets), strict=True):
        assert distance(part, expected) < tolerance
    assert not found[2][VOCAB:].any()


def test_small_probabilities_do_not_underflow_in_fp16():
    V = 50_000
    x, weight = torch.randn(N, C).half(), (torch.randn(V, C) * 0.02).half()
    targets = torch.randint(V, (N,))
    _, _, grad = cross_entropy.chunked_cross_entropy(x, weight, targets, V, 10, False)
    double = weight.double().requires_grad_()
    F.cross_entropy(x.double() @ double.T, targets, reduction="sum").backward()
    others = torch.ones(V, dtype=bool)
    others[targets] = False  # rows whose gradients come from probabilities of 2e-5 only
    assert distance(grad[others], double.grad[others]) < 5e-3


@pytest.mark.parametrize("grad", [True, False])
def test_reductions_none_and_mean(grad):
    x, weight, targets = problem()
    with torch.set_grad_enabled(grad):
        each, mean = (
            linear_cross_entropy(x, weight, targets, vocab_size=VOCAB, reduction=reduction)
            for reduction in ("none", "mean")
        )
    expected = F.cross_entropy(x @ weight[:VOCAB].T, targets, reduction="none")
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(mean, expected.sum() / (targets != -100).sum())


def test_compiled_loss_is_equal_and_all_logits_are_never_in_memory():
    x, weight, targets = problem()
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in [out] if isinstance(part, torch.Tensor))
            return out

    def step(x, weight):
        return linear_cross_entropy(x, weight, targets, vocab_size=VOCAB)

    eager = ours(x, weight, targets)
    with Sizes():
        ours(x, weight, targets)
    assert max(sizes) <= V * C < N * V
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = torch.compile(step, backend="inductor")(x, weight)
    found = loss, *torch.autograd.grad(loss, (x, weight))
    for one, other in zip(eager, found, strict=True):
        torch.testing.assert_close(one, other)


def test_operator_passes_opcheck():
    x, weight, targets = problem()
    inputs = (x.requires_grad_(), weight.requires_grad_(), targets, VOCAB, 10, False)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(cross_entropy.chunked_cross_entropy, inputs, test_utils=checks)


def test_without_targets_the_loss_is_nan_and_gradients_are_zero():
    x, weight, targets = problem()
    found = ours(x, weight, torch.full_like(targets, -100))
    assert found[0].isnan() and not found[1].any() and not found[2].any()
