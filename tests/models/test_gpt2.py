"""GPT-2: sizes, the loss, recomputed activations."""

import pytest
import torch
from families import own_shape
from torch.utils.flop_counter import FlopCounterMode

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.config import ARCHITECTURES

TINY = {"vocab_size": 100, "n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}


def test_the_released_sizes_have_their_parameter_counts():
    counts = []
    for size in ((12, 12, 768), (24, 16, 1024), (36, 20, 1280), (48, 25, 1600)):
        shape = GPTConfig(50257, 1024, *size)
        assert shape.matmul_parameters == shape.parameter_count - 1024 * shape.n_embd
        counts.append(shape.parameter_count)
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]


def test_ignored_positions_cost_no_product_with_the_vocabulary():
    model = GPT(GPTConfig(**TINY))
    input_ids, targets = torch.randint(0, 100, (2, 4, 16))
    flops = []
    for ignored in (16, 4):
        targets[:, ignored:] = -100
        with FlopCounterMode(display=False) as counter:
            model(input_ids, targets).backward()
        flops.append(counter.get_total_flops())
    assert flops[0] - flops[1] == 48 * 6 * 128 * 32  # 12 of 16 positions of 4 rows


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
