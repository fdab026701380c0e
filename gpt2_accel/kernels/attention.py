"""Causal attention in bf16 on a CPU, where the backward of torch's own is slow.

Sequences of up to `SHORT` tokens take an explicit product, softmax and product. Longer ones go through blocks of
queries in the forward and blocks of keys in the backward, so that all probabilities never exist at once; that is
faster only in a compiled model.

Shape letters as in `models/gpt2.py`, and N = B·H.
"""

import math

import torch
import torch.nn.functional as F

from gpt2_accel import kernels
from gpt2_accel.kernels.compile import fused

SHORT = 256  # on 2 cores with AMX, 12 heads of 64: 17 ms against 70 at T = 64, 44 against 56 at 256
BLOCK = 256  # queries, or keys
LOG2E = math.log2(math.e)  # 2 ** x takes less time than e ** x


def applies(q: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> bool:
    """Whether `causal_attention` is the faster way for such queries, (B, H, T, D): in training in bf16 on a CPU,
    without a mask; a long sequence only in a compiled model and without dropout."""
    trains = torch.is_grad_enabled() and q.requires_grad
    if not (kernels.enabled and trains and mask is None):
        return False
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return False
    return q.shape[2] <= SHORT or (torch.compiler.is_compiling() and not dropout)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0
) -> torch.Tensor:
    """softmax(q · k / sqrt(D)) · v, in which each position sees itself and those before it.

    q, k, v, and the result: (B, H, T, D) bf16. `dropout` is the rate at which probabilities are dropped; it needs a
    sequence of at most `SHORT` tokens.
    """
    if q.shape[2] <= SHORT:
        return explicit_attention(q, k, v, dropout)
    assert not dropout
    return blockwise_attention(q, k, v)[0]


def explicit_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0
) -> torch.Tensor:
    """`causal_attention` with all of its probabilities, (B, H, T, T), at once."""
    T, D = q.shape[2:]
    scores = (q / math.sqrt(D)) @ k.mT + future_mask(T, q)
    return F.dropout(scores.softmax(dim=-1), dropout) @ v


def future_mask(T: int, like: torch.Tensor) -> torch.Tensor:
    """(T, T) in the dtype and on the device of `like`: -inf where the key is later than the query, else 0."""
    return like.new_full((T, T), -math.inf).triu(1)


@torch.library.custom_op("gpt2_accel::blockwise_attention", mutates_args=())
def blockwise_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_attention` block by block: q, k, v (B, H, T, D) -> the same shape, and the log-sum-exp of each query's
    scores, (B, H, T) fp32, which is not differentiable."""
    B, H, T, D = q.shape
    y = q.new_empty(B, T, H, D).transpose(1, 2)  # as the model goes on with it
    log_sums = q.new_empty(B, H, T, dtype=torch.float32)
    q, k, v = (part.reshape(-1, T, D) for part in (q, k, v))
    for start in range(0, T, BLOCK):
        queries, seen = slice(start, start + BLOCK), slice(0, start + BLOCK)
        # A product copies what is not contiguous, and slower.
        scores = q[:, queries].contiguous() @ k[:, seen].contiguous().mT
        scores[:, :, start:] += future_mask(scores.shape[1], scores)
        weights, total, log_sum = fused(exponentials)(scores, 1 / math.sqrt(D))
        y[:, :, queries] = (weights @ v[:, seen] / total).view(B, H, -1, D)
        log_sums[:, :, queries] = log_sum.view(B, H, -1)
    return y, log_sums


@blockwise_attention.register_fake
def _(q, k, v):
    B, H, T, D = q.shape
    log_sums = q.new_empty(B, H, T, dtype=torch.float32)
    return q.new_empty(B, T, H, D).transpose(1, 2), log_sums


@torch.library.custom_op("gpt2_accel::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    log_sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v from that of y, (B, H, T, D) each, after FlashAttention (Dao et al., 2022,
    arXiv:2205.14135, algorithm 4): the probabilities come back from the scores and `log_sums`."""
    shape = q.shape
    T, D = shape[2:]
    delta = (grad * y).sum(dim=-1, dtype=torch.float32).view(-1, 1, T)
    log_sums = log_sums.reshape(-1, 1, T)
    grad, q, k, v = (part.reshape(-1, T, D) for part in (grad, q, k, v))
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    for start in range(0, T, BLOCK):
        keys, seeing = slice(start, start + BLOCK), slice(start, None)
        k_block, v_block = k[:, keys].contiguous(), v[:, keys].contiguous()
        q_seeing, grad_seeing = q[:, seeing].contiguous(), grad[:, seeing].contiguous()
        # Keys before queries: so two of the three products below have their factors as they lie in memory.
        scores = k_block @ q_seeing.mT
        width = scores.shape[1]
        scores[:, :, :width] += future_mask(width, scores).mT.contiguous()
        slopes = v_block @ grad_seeing.mT
        probabilities, slopes = fused(score_gradients)(
            scores, slopes, log_sums[:, :, seeing], delta[:, :, seeing], 1 / math.sqrt(D)
        )
        grad_v[:, keys] = probabilities @ grad_seeing
        grad_k[:, keys] = slopes @ q_seeing
        grad_q[:, seeing] += slopes.mT @ k_block
    return grad_q.to(q.dtype).view(shape), grad_k.view(shape), grad_v.view(shape)


@blockwise_attention_backward.register_fake
def _(grad, q, k, v, y, log_sums):
    return tuple(part.new_empty(part.shape) for part in (q, k, v))


def exponentials(
    scores: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The softmax of scores times `scale`, (N, queries, keys), before it is divided by the sum over the keys; that
    sum, and its logarithm as it would be without the largest score taken off, (N, queries, 1) fp32."""
    wide = scores.float() * (scale * LOG2E)
    largest = wide.amax(dim=-1, keepdim=True)
    powers = torch.exp2(wide - largest)
    total = powers.sum(dim=-1, keepdim=True)
    return powers.to(scores.dtype), total, largest / LOG2E + total.log()


def score_gradients(
    scores: torch.Tensor,
    slopes: torch.Tensor,
    log_sums: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, and the gradient of the scores, from the scores and from `slopes`, the gradient of the
    probabilities: all (N, keys, queries); `log_sums` and `delta` (N, 1, queries)."""
    probabilities = torch.exp2(scores.float() * (scale * LOG2E) - log_sums * LOG2E)
    gradient = probabilities * (slopes.float() - delta) * scale
    return probabilities.to(scores.dtype), gradient.to(scores.dtype)


def keep(ctx, inputs, output) -> None:
    """Saves for the backward what it needs."""
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def backward(ctx, grad: torch.Tensor, _) -> tuple[torch.Tensor, ...]:
    """The gradients of the inputs of `blockwise_attention`."""
    return blockwise_attention_backward(grad, *ctx.saved_tensors)


blockwise_attention.register_autograd(backward, setup_context=keep)
