"""Chunked cross-entropy: values and gradients equal the plain loss."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from conftest import kernel_choices
from torch.profiler import profile

from gpt2_accel.kernels import cross_entropy
from gpt2_accel.models.parts import head_loss

N, C, V, VOCAB = 37, 16, 256, 250
CAP = 15.0  # nanochat's; logits of 12 are changed much
Z_LOSS = 0.02  # makes gradients up to 2.5 times as large
# kernels, reduction, z_loss, soft_cap
LOSSES = [
    (True, "mean", 0.0, None),
    (True, "none", 0.0, None),
    (True, "mean", Z_LOSS, None),
    (False, "mean", Z_LOSS, None),
    (True, "mean", 0.0, CAP),
    (True, "none", 0.0, CAP),
    (True, "mean", Z_LOSS, CAP),
    (False, "none", 0.0, CAP),
    (False, "mean", Z_LOSS, CAP),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 10 * V)


def problem(spread=1.0):
    x = torch.randn(N, C)
    weight = torch.randn(V, C) * spread
    targets = torch.randint(VOCAB, (N,))
    targets[::5] = -100
    return x, weight, targets


def reference(x, weight, targets, z_loss=0.0, soft_cap=None):
    """Returns loss, z and gradients in fp64, from all logits at once."""
    x, weight = (part.double().requires_grad_() for part in (x, weight))
    logits = x @ weight[:VOCAB].T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    z = logits[targets != -100].logsumexp(dim=1).square().mean()
    loss = F.cross_entropy(logits, targets) + z_loss * z
    return loss.detach(), z.detach(), *torch.autograd.grad(loss, (x, weight))


def scalars(x, weight, targets, reduction="mean", z_loss=0.0, soft_cap=None):
    """Returns the mean loss and z, which is 0 without `z_loss`."""
    loss = head_loss(x[None], weight, targets[None], VOCAB, reduction, z_loss, soft_cap)
    if reduction == "none":
        loss = loss.sum() / (targets != -100).sum()
    return loss if z_loss else (loss, torch.zeros(()))


def ours(x, weight, targets, loss, dtype=None):
    x, weight = (part.clone().requires_grad_() for part in (x, weight))
    enabled, *settings = loss
    with torch.autocast("cpu", dtype, enabled=dtype is not None), kernel_choices(enabled=enabled):
        loss, z = scalars(x, weight, targets, *settings)
    return loss.detach(), z, *torch.autograd.grad(loss, (x, weight))


def distance(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


# The tolerance is several rounding errors. A large spread gives probabilities near 0 and 1.
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (None, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_loss_and_gradients_equal_fp64(dtype, tolerance, spread, loss):
    x, weight, targets = problem(spread)
    if dtype == torch.float64:
        actual = ours(x.double(), weight.double(), targets, loss)
    else:
        rounded = dtype or torch.float32
        x = x.to(rounded).float()
        weight = weight.to(rounded).float()  # the inputs of the products
        actual = ours(x, weight, targets, loss, dtype)
    expected = reference(x, weight, targets, *loss[2:])
    assert [part.dtype for part in actual[2:]] == [actual[0].dtype] * 2
    assert not actual[1].requires_grad
    for place in (0, 1, 2, 3) if loss[2] else (0, 2, 3):
        assert distance(actual[place], expected[place]) < tolerance
    assert not actual[3][VOCAB:].any()


def test_small_probabilities_do_not_underflow_in_fp16():
    V = 50_000
    x = torch.randn(N, C).half()
    weight = (torch.randn(V, C) * 0.02).half()
    targets = torch.randint(V, (N,))
    _, _, grad = cross_entropy.chunked_cross_entropy(x, weight, targets, V, 10, False, None, 0.0)
    double = weight.double().requires_grad_()
    F.cross_entropy(x.double() @ double.T, targets, reduction="sum").backward()
    others = torch.ones(V, dtype=bool)
    others[targets] = False  # rows whose gradients come from probabilities of 2e-5 only
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
    _, z = head_loss(*given, z_loss=1.0)
    torch.testing.assert_close(z, logits[targets != -100].logsumexp(dim=1).square().mean())


@pytest.mark.parametrize("loss", LOSSES[:3] + LOSSES[4:6])
def test_peak_memory_is_far_below_all_logits(loss, monkeypatch):
    N, V = 512, 2048
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 32 * V)
    x = torch.randn(N, C)
    weight = torch.randn(V, C)
    targets = torch.randint(VOCAB, (N,))
    with profile(profile_memory=True) as profiled:
        ours(x, weight, targets, loss)
    events = profiled.profiler.kineto_results.events()
    peak = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    assert peak < N * V * 4 / (3 if loss[3] is None else 2)


def test_compiled_loss_is_equal():
    *inputs, targets = problem()
    inputs = [part.requires_grad_() for part in inputs]

    def total(x, weight):
        return sum(scalars(x, weight, targets, *loss[1:])[0] for loss in LOSSES[:7])

    compiled = torch.compile(total, backend="inductor", fullgraph=True)
    one, other = (call(*inputs) for call in (compiled, total))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(*(torch.autograd.grad(loss, inputs) for loss in (one, other)))


@pytest.mark.parametrize("loss", [loss for loss in LOSSES[2:] if loss[1] == "mean"])
def test_without_targets_the_loss_is_nan_and_gradients_are_zero(loss):
    x, weight, targets = problem()
    actual = ours(x, weight, torch.full_like(targets, -100), loss)
    assert actual[0].isnan()
    assert not actual[2].any()
    assert not actual[3].any()
