"""ROUNDING=SEED: matrix products differ from those of this CPU as those of another CPU do.

With this folder in PYTHONPATH, torch imports this module at the end of its own import, in each
Python process, as it does with a device backend. It replaces kernels below autograd, autocast and
compiled code.

Kernels for SSE4, AVX2 and AVX-512 differ in fp32 by up to 8 units of 2^-24 of a row's root mean
square, in bf16 by a rounding of few elements. The noise is a hash of an element's bits and of the
row's length: an equal product stays equal, so a resume is exact.
"""

import os
import warnings

import torch

PRODUCTS = """
mm addmm bmm baddbmm addmv addbmm dot _addmm_activation addmm_ baddbmm_
mm.out addmm.out bmm.out baddbmm.out addmv.out
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
"""
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
LIBRARY = torch.library.Library("aten", "IMPL")


def moved(product):
    """Returns a product with noise. Zeros stay: they are masks and padding."""
    if product.dtype not in INTEGERS:
        return product
    bits = product.view(INTEGERS[product.dtype])
    seed = int(os.environ["ROUNDING"]) + 0.7
    noise = ((bits.double() * seed + product.shape[-1:].numel()).sin() * 1e5).frac()
    if product.dtype == torch.float32:  # in fp64, since 1 + 2^-24 is 1 in fp32
        count = (product != 0).sum(-1, keepdim=True)
        rms = product.double().norm(dim=-1, keepdim=True) / count.sqrt()
        new = (product + noise * rms * 2**-21).float()
    else:  # by one unit in one of 1,000 elements
        new = (bits + (noise / 0.999).trunc()).to(bits.dtype).view(product.dtype)
    return new.where((product != 0) & new.isfinite(), product)


def replace(name):
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(keys, *args, **kwargs):
        result = kernel.call_boxed(keys, *args, **kwargs)
        if isinstance(result, tuple):  # attention: the output and the logsumexp, or three gradients
            count = 3 if "backward" in name else 1
            return *map(moved, result[:count]), *result[count:]
        return result.copy_(moved(result)) if name.endswith(("out", "_")) else moved(result)

    LIBRARY.impl(name, call, "CPU", with_keyset=True)


def start():
    """torch calls it after the import of this module."""


with warnings.catch_warnings(action="ignore"):  # that there are kernels
    for each in PRODUCTS.split():
        replace(each)
