"""Chunked cross-entropy: values and gradients equal the plain loss."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import kernel_choices

from gpt2_accel.kernels import cross_entropy
from gpt2_accel.models.parts import head_loss

N, C, V, VOCAB = 37, 16, 256, 250
CAP = 15.0  # nanochat's; logits of 12 are changed much


class Case(NamedTuple):
    kernels: bool
    reduction: str
    soft_cap: float | None = None


class Result(NamedTuple):
    """The mean loss, and the gradients of `x` and of the weight."""

    loss: torch.Tensor
    grad_x: torch.Tensor
    grad_weight: torch.Tensor


CHUNKED = [Case(True, "mean"), Case(True, "none"), Case(True, "mean", CAP), Case(True, "none", CAP)]
PLAIN = [Case(False, "mean"), Case(False, "none", CAP)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 10 * V)


def problem(spread=1.0):
    """Returns x (N, C), a weight with rows of padding (V, C), and targets (N,), some ignored."""
    x = torch.randn(N, C)
    weight = torch.randn(V, C) * spread
    targets = torch.randint(VOCAB, (N,))
    targets[::5] = -100
    return x, weight, targets


def reference(x, weight, targets, case):
    """Computes the result in fp64, from all logits at once."""
    x = x.double().requires_grad_()
    weight = weight.double().requires_grad_()
    logits = x @ weight[:VOCAB].T
    if case.soft_cap is not None:
        logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
    loss = F.cross_entropy(logits, targets)
    return Result(loss.detach(), *torch.autograd.grad(loss, (x, weight)))


def mean_loss(x, weight, targets, case):
    loss = head_loss(x[None], weight, targets[None], VOCAB, case.reduction, case.soft_cap)
    return loss if case.reduction == "mean" else loss.sum() / (targets != -100).sum()


def ours(x, weight, targets, case, dtype=None):
    """Computes the result by `head_loss`, with autocast to `dtype`."""
    x = x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
    with autocast, kernel_choices(enabled=case.kernels):
        loss = mean_loss(x, weight, targets, case)
    return Result(loss.detach(), *torch.autograd.grad(loss, (x, weight)))


def distance(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


# The tolerance is several rounding errors. A large spread gives probabilities near 0 and 1.
@pytest.mark.parametrize("case", CHUNKED + PLAIN)
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (None, 1e-5), (torch.bfloat16, 6e-2), (torch.float16, 6e-3)],
)
def test_loss_and_gradients_equal_fp64(dtype, tolerance, spread, case):
    x, weight, targets = problem(spread)
    if dtype == torch.float64:
        actual = ours(x.double(), weight.double(), targets, case)
    else:
        # The reference gets the rounded inputs of the matrix products.
        rounded = dtype or torch.float32
        x = x.to(rounded).float()
        weight = weight.to(rounded).float()
        actual = ours(x, weight, targets, case, dtype)
    expected = reference(x, weight, targets, case)
    assert actual.grad_x.dtype == actual.grad_weight.dtype == actual.loss.dtype
    assert distance(actual.loss, expected.loss) < tolerance
    assert distance(actual.grad_x, expected.grad_x) < tolerance
    assert distance(actual.grad_weight, expected.grad_weight) < tolerance
    assert not actual.grad_weight[VOCAB:].any()


def test_small_probabilities_do_not_underflow_in_fp16():
    V = 50_000
    x = torch.randn(N, C).half()
    weight = (torch.randn(V, C) * 0.02).half()
    targets = torch.randint(V, (N,))
    _, _, grad = cross_entropy.chunked_cross_entropy(x, weight, targets, V, 10, False, None)
    double = weight.double().requires_grad_()
    F.cross_entropy(x.double() @ double.T, targets, reduction="sum").backward()
    others = torch.ones(V, dtype=bool)
    others[targets] = False  # rows whose gradients come from probabilities of 2e-5 only
    grad = grad.double() / cross_entropy.FP16_SCALE
    assert distance(grad[others], double.grad[others]) < 5e-3


def test_rows_have_gradients_of_their_own():
    x, weight, targets = problem()
    inputs = x.double().requires_grad_(), weight.double().requires_grad_()

    def rows(x, weight):
        return head_loss(x[None], weight, targets[None], VOCAB, "none", soft_cap=CAP)

    torch.autograd.gradcheck(rows, inputs, fast_mode=True)


@torch.no_grad()
def test_losses_without_gradients_equal_cross_entropy():
    x, weight, targets = problem()
    given = (x[None], weight, targets[None], VOCAB)
    logits = x @ weight[:VOCAB].T
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(head_loss(*given, "none")[0], expected)
    torch.testing.assert_close(head_loss(*given), expected.sum() / (targets != -100).sum())


@pytest.mark.parametrize(
    ("backend", "cases"), [("aot_eager", CHUNKED[::3]), ("inductor", CHUNKED[:1])]
)
def test_compiled_loss_is_equal(backend, cases):
    *inputs, targets = problem()
    inputs = [part.requires_grad_() for part in inputs]

    def total(x, weight):
        return sum(mean_loss(x, weight, targets, case) for case in cases)

    compiled = torch.compile(total, backend=backend, fullgraph=True)(*inputs)
    eager = total(*inputs)
    torch.testing.assert_close(compiled, eager)
    gradients = torch.autograd.grad(compiled, inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(eager, inputs))


@pytest.mark.parametrize("case", [case for case in CHUNKED + PLAIN if case.reduction == "mean"])
def test_without_targets_the_loss_is_nan_and_gradients_are_zero(case):
    x, weight, targets = problem()
    actual = ours(x, weight, torch.full_like(targets, -100), case)
    assert actual.loss.isnan()
    assert not actual.grad_x.any()
    assert not actual.grad_weight.any()
