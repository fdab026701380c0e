"""The Triton kernel of the loss's softmax, by Triton's interpreter: `make test-gpu-code`."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 4e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("V, spread", [(50304, 0.1), (50304, 30.0), (300, 3.0)])
def test_rows_are_those_of_softmax(V, spread, dtype, tolerance):
    from gpt2_accel.kernels.softmax import scaled_softmax_

    logits = (torch.randn(4, V) * spread).to(dtype)
    logits[:, V - 47 :] = -torch.inf  # padding
    factor = torch.tensor([[1.0], [0.0], [0.25], [4.0]])
    wide = logits.double()
    larger = torch.empty(5, V, dtype=dtype)  # as in the loss: a view of a larger tensor
    actual = larger[:4].copy_(logits)
    log_sum = scaled_softmax_(actual, factor)
    torch.testing.assert_close(
        log_sum.double(), wide.logsumexp(1, keepdim=True), atol=1e-5, rtol=1e-6
    )
    expected = wide.softmax(1) * factor
    assert (actual.double() - expected).norm() < tolerance * expected.norm()
    assert not actual[:, V - 47 :].any()
    assert not actual[1].any()
