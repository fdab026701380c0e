"""The output head and the loss in one, so that the logits of all positions never exist at once.

At GPT-2's vocabulary the logits are the largest thing in training: of 64 sequences of 1,024 tokens 6.6 GB in
bf16, and the plain loss makes copies of them in fp32. Here they are made for some rows, turned in place into
their own gradient, multiplied into the gradients of the input and of the weight, and forgotten.

Shape letters as in `model.py`, and N rows, one for each position of each sequence.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

LOGITS_AT_ONCE = 2**26  # elements: 1,334 rows of GPT-2's vocabulary
# Below 6e-8 fp16 is zero, and so are many of 50,257 probabilities: those times 4 are fewer, and a column of a whole
# chunk of them still adds up to a finite number.
FP16_SCALE = 4.0


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy, in nats, of the logits `x @ weight.T`, of which those from `vocab_size` on do not count.

    x: (N, C) and weight: (V, C), floating point; targets: (N,) int64 below `vocab_size`, -100 where there is
    nothing to predict. Returns the mean over the other targets, a scalar, or with `reduction` "none" that
    of each, (N,), 0 at -100. Under autocast the products are in its dtype.

    The gradient of a mean is that of the chunks, once: there is no second derivative.
    """
    chunks = -(-len(x) * len(weight) // LOGITS_AT_ONCE)
    if chunks <= 1:
        return plain(x, weight, targets, vocab_size, reduction)
    rows = -(-len(x) // chunks)
    if reduction == "mean" and torch.is_grad_enabled():
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        total, _, _ = chunked(x, weight, targets, vocab_size, rows, torch.compiler.is_compiling())
        return total / (targets != -100).sum()
    nats = torch.cat(
        [
            plain(x[i : i + rows], weight, targets[i : i + rows], vocab_size, "none")
            for i in range(0, len(x), rows)
        ]
    )
    return nats if reduction == "none" else nats.sum() / (targets != -100).sum()


def plain(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, reduction: str
) -> torch.Tensor:
    """`linear_cross_entropy` through all logits at once."""
    # The product runs over all padded rows, the faster shape; a bias of -inf then takes the pad
    # rows out of the softmax without another copy of the logits.
    pad_bias = x.new_zeros(len(weight))
    pad_bias[vocab_size:] = -math.inf
    return F.cross_entropy(F.linear(x, weight, pad_bias), targets, reduction=reduction)


# An operator of its own: a compiler that looked inside would move what only the gradients need to the backward
# pass, and keep the logits of all rows until then.
@torch.library.custom_op("gpt2_accel::linear_cross_entropy", mutates_args=())
def chunked(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    rows: int,
    compiled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the rows' cross-entropies, and its gradients, from the logits of so many `rows` at a time.

    x: (N, C), whose dtype is that of the products; weight: (V, C); targets: (N,). Returns the sum, a scalar, the
    gradient of x, (N, C), and that of the weight, (V, C), all in fp32, or in fp64 if x is. `compiled` fuses
    the elementwise part.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = FP16_SCALE if x.dtype == torch.float16 else 1.0
    w = weight.to(x.dtype)
    softmax = fused_softmax() if compiled else scaled_softmax
    total = x.new_zeros((), dtype=wide)
    grad_x = torch.empty_like(x, dtype=wide)
    grad_w = torch.zeros_like(weight, dtype=wide)
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            t = targets[part, None]
            counts = t != -100
            t = t.clamp(min=0)
            logits = F.linear(x[part], w)
            logits[:, vocab_size:] = -math.inf
            at_target = logits.gather(1, t).to(wide)
            gradient, log_sum = softmax(logits, scale)
            del logits
            log_probability = at_target - log_sum
            total -= log_probability.masked_fill(~counts, 0).sum()
            # Softmax less one at the target, where most of the gradient is: exact also when both are close.
            gradient.scatter_(1, t, (log_probability.expm1() * scale).to(gradient.dtype))
            grad_x[part] = (gradient @ w) * (counts / scale)
            grad_w += gradient.t() @ (x[part] * counts)
    return total, grad_x, grad_w.div_(scale)


@chunked.register_fake
def _(x, weight, targets, vocab_size, rows, compiled):
    wide = torch.promote_types(x.dtype, torch.float32)
    like = functools.partial(torch.empty_like, dtype=wide)
    return x.new_empty((), dtype=wide), like(x), like(weight)


def keep_gradients(ctx, inputs, output) -> None:
    """Saves for the backward pass what the forward has found."""
    x, weight, *_ = inputs
    _, grad_x, grad_w = output
    ctx.dtypes = x.dtype, weight.dtype
    ctx.save_for_backward(grad_x, grad_w)


def scale_gradients(ctx, grad_total: torch.Tensor, *_) -> tuple[torch.Tensor | None, ...]:
    """The gradients by the chain rule: `grad_total` is a scalar."""
    grads = [
        (grad * grad_total).to(dtype)
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    ]
    return *grads, None, None, None, None


chunked.register_autograd(scale_gradients, setup_context=keep_gradients)


def scaled_softmax(logits: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (rows, V) -> softmax times `scale`, (rows, V) in their dtype, and the log of the sum of the
    exponentials, (rows, 1) in fp32 or fp64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sum = wide.logsumexp(dim=1, keepdim=True)
    return ((wide - log_sum).exp() * scale).to(logits.dtype), log_sum


@functools.cache
def fused_softmax() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`scaled_softmax` as one kernel without copies in between."""
    return torch.compile(scaled_softmax, dynamic=True)
