"""GPT-2: sizes, recomputed activations."""

import pytest
import torch
from families import own_shape

from gpt2_accel import GPTConfig
from gpt2_accel.config import ARCHITECTURES


def test_the_released_sizes_have_their_parameter_counts():
    counts = []
    for size in ((12, 12, 768), (24, 16, 1024), (36, 20, 1280), (48, 25, 1600)):
        shape = GPTConfig(50257, 1024, *size)
        assert shape.matmul_parameters == shape.parameter_count - 1024 * shape.n_embd
        counts.append(shape.parameter_count)
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpointed_activations_give_equal_gradients_with_less_memory(architecture):
    model = own_shape(architecture, n_positions=64).build()
    tokens = torch.randint(100, (2, 64))
    gradients = []
    kept = []
    for model.checkpoint_activations in (False, True):
        sizes: list[int] = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        torch.compiler.reset()
        forward = torch.compile(model, backend="aot_eager") if architecture == "gpt2" else model
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(tokens, tokens)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        kept.append(sum(sizes))
    torch.testing.assert_close(*gradients)
    assert kept[1] < 0.6 * kept[0]
