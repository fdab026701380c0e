"""Causal attention by hardware: torch's fastest kernel on a GPU; on a CPU in bf16 a faster backward for short sequences.

On a CPU the forward is torch's flash attention. The backward keeps all probabilities in memory and uses bf16 products, which
accumulate in fp32 but round their results. Gradients from rounded scores would be several times less exact than
torch's, so a second product computes the rounding error of the first.

Shape letters as in `models/gpt2.py`, and N = B·H.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2_accel import kernels

# cuDNN before 9.15.1 computes wrong values for other lengths (pytorch/pytorch#169849).
CUDNN_LENGTHS = 128

# With AVX512-BF16 the time is 0.55 of torch's at T = 64, 0.65 at 128, and the same at 256.
SHORT = 128


def applies(q: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> bool:
    """Whether to use `causal_attention` for queries of shape (B, H, T, D): in training, in bf16, on a CPU, for a short
    sequence, without a mask or dropout."""
    trains = torch.is_grad_enabled() and q.requires_grad
    if not (kernels.choices.enabled and trains and mask is None and not dropout):
        return False
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT


def preferred(length: int, causal: bool) -> AbstractContextManager:
    """Returns the context of `F.scaled_dot_product_attention` in which torch prefers the kernels of `sdpa_order`.

    cuDNN's is left out except for causal attention of some lengths: with masks it would plan anew for each length.
    """
    cudnn = causal and length % CUDNN_LENGTHS == 0
    order = [
        getattr(SDPBackend, name)
        for name in kernels.choices.sdpa_order
        if name != "CUDNN_ATTENTION" or cudnn
    ]
    if not (kernels.choices.enabled and order):
        return nullcontext()
    return sdpa_kernel(order, set_priority=True)


def takes_groups(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel takes fewer heads of keys and values than of queries, q: (B, H, T, D).

    On a GPU only flash attention and cuDNN's do. Torch's plain attention would keep the scores, (B, H, T, T).
    """
    if q.device.type != "cuda":
        return True
    flash = "FLASH_ATTENTION" in kernels.choices.sdpa_order
    return flash and mask is None and q.dtype in (torch.float16, torch.bfloat16)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns softmax(q · k / sqrt(D)) · v under a causal mask. q, k, v and the result: (B, H, T, D) bf16."""
    return CausalAttention.apply(q, k, v)


class CausalAttention(torch.autograd.Function):
    """Combines torch's forward with `attention_backward`."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v (B, H, T, D) -> the same shape."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, log_sums = attention(q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, y, log_sums)
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """grad: (B, H, T, D) -> the gradients of q, k and v, (B, H, T, D) each."""
        return attention_backward(grad, *ctx.saved_tensors)


# A custom operator, opaque to Dynamo. Otherwise the compiler would drop the rounding between the two products, which
# the second one corrects.
@torch.library.custom_op("gpt2_accel::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    log_sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v from `grad`, the gradient of y; all are (B, H, T, D) bf16.

    FlashAttention's backward (Dao et al., 2022, arXiv:2205.14135, algorithm 4) with a single block. `log_sums`,
    (B, H, T) fp32, holds the log-sum-exp of each query's scores."""
    shape = q.shape
    T, D = shape[2:]
    scale = 1 / math.sqrt(D)
    # The gradient of a probability is grad · v minus its mean. The mean is nearly grad · y, which the product subtracts
    # through an added column of -1; the remainder is subtracted below.
    mean = (grad * y).sum(dim=-1, keepdim=True)
    grad_mean = torch.cat([grad, mean], dim=-1).reshape(-1, T, D + 1)
    v_ones = torch.cat([v, v.new_full((*shape[:3], 1), -1)], dim=-1).reshape(-1, T, D + 1)
    grad, q, k = (part.reshape(-1, T, D) for part in (grad, q, k))
    scores = q @ k.mT
    rounding_error = torch.baddbmm(scores, q, k.mT, beta=-1)
    probabilities = scores.float().add_(rounding_error).mul_(scale).sub_(log_sums.reshape(-1, T, 1))
    probabilities = probabilities.add_(future_mask(T, probabilities)).exp_()
    grad_v = probabilities.to(q.dtype).mT @ grad
    grad_scores = grad_mean @ v_ones.mT
    grad_scores = grad_scores - (probabilities * grad_scores).sum(dim=-1, keepdim=True)
    grad_scores = grad_scores.mul_(probabilities).mul_(scale).to(q.dtype)
    return tuple(part.view(shape) for part in (grad_scores @ k, grad_scores.mT @ q, grad_v))


@attention_backward.register_fake
def _(grad, q, k, v, y, log_sums):
    return tuple(part.new_empty(part.shape) for part in (q, k, v))


def future_mask(T: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a (T, T) mask in the dtype and on the device of `like`: -inf where the key follows the query, else 0."""
    return like.new_full((T, T), -math.inf).triu(1)
