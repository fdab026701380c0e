"""Chunked linear cross-entropy: output head and loss, without all logits in memory at once.

With GPT-2's vocabulary the logits are the largest tensor in training: 6.6 GB in bf16 for 64
sequences of 1,024 tokens, and the plain loss copies them to fp32. Here a chunk of rows is computed,
replaced in place by its gradient, multiplied into the gradients of the input and the weight, and
freed.

Shape letters as in `models/gpt2.py`; N = B·T rows.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from gpt2_accel import kernels
from gpt2_accel.kernels.compile import fused
from gpt2_accel.rounding import ceil_div

LOGITS_AT_ONCE = 2**25  # elements, on a CPU: 667 rows of GPT-2's vocabulary
ROWS_IN_CACHE = 32  # rows of GPT-2's bf16 logits: 1.6 MB for each of 2 cores
# In fp16 numbers below 6e-8 are zero, and so are many of 50,257 probabilities. Times 4 fewer are,
# and the sum of a chunk's column is still finite.
FP16_SCALE = 4.0


def rows_at_once(x: torch.Tensor, weight: torch.Tensor, logits: int) -> int:
    """Returns the rows of a chunk: x, (N, C), is split into equal parts of `logits` logits."""
    chunks = ceil_div(len(x) * len(weight), logits)
    return ceil_div(len(x), chunks)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    reduction: str,
    soft_cap: float | None,
) -> torch.Tensor:
    """Returns the cross-entropy in nats of the logits `x @ weight.T`.

    Columns from `vocab_size` on are padding and do not count. x: (N, C) and weight: (V, C),
    floating point; targets: (N,) int64 below `vocab_size`, or -100 to ignore a row. The result is
    the mean over the rows that are not ignored, a scalar, or with `reduction` "none" the loss of
    each row, (N,), 0 for ignored rows. `soft_cap` limits the logits, see `capped`.

    Under autocast the products are in its dtype. The results have no second derivative. The
    backward of "none" computes the logits again: four products with the vocabulary instead of
    three.
    """
    at_once = kernels.choices.logits_at_once or LOGITS_AT_ONCE
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:  # autocast leaves fp64
        x = x.to(torch.get_autocast_dtype(device))
    # In fp16 the columns of larger chunks could add up to infinity.
    half = x.dtype == torch.float16
    rows = rows_at_once(x, weight, LOGITS_AT_ONCE if half else at_once)
    fuse = kernels.choices.fuse or torch.compiler.is_compiling()
    arguments = x, weight, targets, vocab_size, rows, fuse, soft_cap
    if reduction == "mean" and torch.is_grad_enabled():
        total, _, _ = chunked_cross_entropy(*arguments)
        return mean_of(total, targets)
    with torch.no_grad():
        # Here each chunk also has two copies in fp32.
        rows = rows_at_once(x, weight, max(LOGITS_AT_ONCE, at_once // 4))
        w = weight.to(x.dtype)  # once, not for each chunk
        losses = [
            plain_cross_entropy(part, w, t, vocab_size, "none", soft_cap)
            for part, t in zip(x.split(rows), targets.split(rows), strict=True)
        ]
        nats = torch.cat(losses)
    if reduction == "mean":
        return mean_of(nats.sum(), targets)
    return RowLosses.apply(nats, *arguments)


def plain_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    reduction: str,
    soft_cap: float | None,
) -> torch.Tensor:
    """Returns what `linear_cross_entropy` returns, from all logits at once."""
    # The product includes the padding rows, which is the faster shape. A bias of -inf removes them
    # from the softmax without another copy of the logits.
    bias = x.new_zeros(len(weight))
    bias[vocab_size:] = -math.inf
    logits = capped(F.linear(x, weight, bias), soft_cap)
    return F.cross_entropy(at_least_fp32(logits), targets, reduction=reduction)


class RowLosses(torch.autograd.Function):
    """Gives gradients to the losses of rows, which were computed without.

    The backward computes the logits again, so they are not stored. It has no derivative.
    """

    @staticmethod
    def forward(ctx: Any, nats: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.save_for_backward(*arguments[:3])
        ctx.settings = arguments[3:]
        return nats.view_as(nats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, grad_x, grad_w = chunked_cross_entropy(*ctx.saved_tensors, *ctx.settings, grad)
        return None, grad_x, grad_w, None, None, None, None, None


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """Returns x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def capped(logits: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Returns `soft_cap` · tanh(logits / `soft_cap`) (Gemma 2, 2024, arXiv:2408.00118, section 2).

    It is computed in fp32 or fp64 and has the dtype of the logits. Logits of -inf, which are
    padding, stay so. None does not cap.
    """
    if soft_cap is None:
        return logits
    x = at_least_fp32(logits)
    x = soft_cap * (x / soft_cap).tanh()
    return x.to(logits.dtype).masked_fill(logits == -math.inf, -math.inf)


def slope(x: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Returns the derivative of `capped` where it returns x: 1 - (x / `soft_cap`)², 0 at -inf."""
    return 1 - (x / soft_cap).clamp(min=-1).square()


def mean_of(total: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns `total` divided by the number of targets that are not -100.

    If all are, the mean is NaN and its gradient 0, as in torch.
    """
    count = (targets != -100).sum()
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


# A custom operator is opaque to Dynamo. Otherwise the compiler would move the gradients to the
# backward pass, and store the logits of all rows until then.
@torch.library.custom_op("gpt2_accel::linear_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    rows: int,
    compiled: bool,
    soft_cap: float | None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the sum of the cross-entropy over rows, and its gradients.

    x: (N, C), in the dtype of the products; weight: (V, C); targets: (N,); factors: (N,), by which
    the gradient of each row's loss is multiplied. Returns the sum, a scalar in fp32 (fp64 if x is),
    and the gradients of x, (N, C), and of the weight, (V, C). They are in the dtype of x, but the
    weight's is in fp32 if it is added up over chunks. Without factors they are multiplied by
    `gradient_scale`. `rows` rows of logits are in memory at a time. `compiled` fuses elementwise
    operations.
    """
    accumulate_dtype = torch.promote_types(x.dtype, torch.float32)
    w = weight.to(x.dtype)
    gradient_ = gradient_function(x, compiled, soft_cap)
    transposed = fused(transpose) if compiled else transpose
    wide = x.dtype == accumulate_dtype
    # In half precision a CPU transposes the smaller matrix: faster than a product along the columns
    # of the other.
    by_columns = x.device.type == "cpu" and not wide
    if factors is None:
        factors = torch.full_like(targets, gradient_scale(x.dtype), dtype=accumulate_dtype)
    factors = factors.masked_fill(targets == -100, 0)[:, None]
    targets = targets.clamp(min=0)[:, None]
    total = x.new_zeros((), dtype=accumulate_dtype)
    grad_x = torch.empty_like(x)
    grad_w = None  # transposed, if `by_columns`
    # One row more than a chunk, so each part is a view of a larger tensor. Dynamo would compile
    # again for a part that is not.
    buffer = x.new_empty(rows + 1, len(weight))
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            x_rows = x[chunk]
            gradient = torch.mm(x_rows, w.t(), out=buffer[: len(x_rows)])
            gradient[:, vocab_size:] = -math.inf
            total += loss_and_gradient_(
                gradient, targets[chunk], factors[chunk], gradient_, soft_cap
            )
            torch.mm(gradient, w, out=grad_x[chunk])
            pair = (transposed(x_rows), gradient) if by_columns else (gradient.t(), x_rows)
            if grad_w is None:
                grad_w = torch.mm(*pair)
            elif wide:
                grad_w.addmm_(*pair)
            else:
                grad_w = grad_w.to(accumulate_dtype).add_(torch.mm(*pair))
    assert grad_w is not None, "no rows"
    return total, grad_x, transposed(grad_w) if by_columns else grad_w


def loss_and_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: torch.Tensor,
    gradient_: Callable,
    soft_cap: float | None,
) -> torch.Tensor:
    """Replaces logits, (rows, V), by the gradient of each row's loss times `factor`.

    targets: (rows, 1); factor: (rows, 1) in fp32 or fp64, 0 for rows that do not count; `gradient_`
    as `scaled_gradient_`. Returns the sum of the losses, a scalar in the dtype of `factor`.
    """
    if logits.device.type == "cpu":
        at_once = ROWS_IN_CACHE  # it reads each row several times
    elif gradient_ is scaled_gradient_:  # not compiled: it copies the rows
        at_once = LOGITS_AT_ONCE // logits.shape[1] + 1
    else:
        at_once = len(logits)
    row = torch.arange(len(logits), device=logits.device)[:, None]
    at_target = capped(logits[row, targets].to(factor.dtype), soft_cap)
    parts = zip(logits.split(at_once), factor.split(at_once), strict=True)
    log_sum = torch.cat([gradient_(part, f, soft_cap) for part, f in parts])
    log_probability = at_target - log_sum
    # softmax - 1 at the target, by expm1: exact also where the softmax is close to 1.
    at_target_gradient = log_probability.expm1() * factor
    if soft_cap:
        at_target_gradient *= slope(at_target, soft_cap)
    logits[row, targets] = at_target_gradient.to(logits.dtype)
    return -log_probability.masked_fill(factor == 0, 0).sum()


@chunked_cross_entropy.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    rows: int,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    accumulate_dtype = torch.promote_types(x.dtype, torch.float32)
    grad_w_dtype = x.dtype if len(x) <= rows else accumulate_dtype
    grad_w = torch.empty_like(weight, dtype=grad_w_dtype)
    return x.new_empty((), dtype=accumulate_dtype), torch.empty_like(x), grad_w


def gradient_scale(dtype: torch.dtype) -> float:
    """Returns the factor of the gradients of `chunked_cross_entropy`, by the dtype of x."""
    return FP16_SCALE if dtype == torch.float16 else 1.0


def keep_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    """Saves the gradients for the backward pass."""
    ctx.save_for_backward(*output[1:])


def scale_gradients(ctx: Any, grad_total: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """Scales the saved gradients by `grad_total`, a scalar.

    Autograd casts them to the dtypes of x and the weight. The other arguments have no gradient.
    """
    grad_x, grad_w = ctx.saved_tensors
    factor = grad_total / gradient_scale(grad_x.dtype)
    # In fp32: the factor is not rounded.
    grad_x = at_least_fp32(grad_x) * factor
    return grad_x, at_least_fp32(grad_w) * factor, None, None, None, None, None, None


chunked_cross_entropy.register_autograd(scale_gradients, setup_context=keep_gradients)


def gradient_function(x: torch.Tensor, compiled: bool, soft_cap: float | None) -> Callable:
    """Returns `scaled_gradient_`, compiled if `compiled`, or a kernel that is faster on a GPU."""
    if not compiled:
        return scaled_gradient_
    nvidia = x.is_cuda and torch.version.hip is None  # a block of 32 warps is too large for AMD
    if nvidia and soft_cap is None and x.dtype != torch.float64:
        with suppress(ImportError):  # no Triton
            from gpt2_accel.kernels.softmax import scaled_softmax_

            return lambda logits, factor, _: scaled_softmax_(logits, factor)
    return fused(scaled_gradient_)


def scaled_gradient_(
    logits: torch.Tensor, factor: torch.Tensor, soft_cap: float | None
) -> torch.Tensor:
    """Replaces logits, (rows, V), by softmax · `factor`: the gradient except at the target.

    factor: (rows, 1) in fp32 or fp64. Returns each row's log-sum-exp, (rows, 1) in fp32 or fp64.

    With `soft_cap` the softmax and log-sum-exp are computed from the capped logits, the gradient
    for the logits before the cap.
    """
    x = capped(at_least_fp32(logits), soft_cap)
    # Not `logsumexp`: inductor then reads the logits twice instead of three times.
    largest = x.amax(dim=1, keepdim=True)
    powers = (x - largest).exp()
    total = powers.sum(dim=1, keepdim=True)
    if soft_cap:
        powers = powers * slope(x, soft_cap)
    logits.copy_(powers * (factor / total))
    return largest + total.log()


def transpose(x: torch.Tensor) -> torch.Tensor:
    """(rows, C) -> (C, rows), contiguous."""
    return x.t().contiguous()
