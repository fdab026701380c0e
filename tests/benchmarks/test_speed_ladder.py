"""The speed ladder: its hand-written models equal `GPT`, and its command measures every rung."""

import sys

import pytest
import torch
from launching import ROOT

from gpt2_accel import GPT, GPTConfig

sys.path.append(str(ROOT / "benchmarks"))

from reference_model import PlainLoss, slow_gpt


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hand_norm_gelu", [True, False])
@pytest.mark.parametrize("stored_mask", [True, False])
def test_hand_written_model_equals_gpt(stored_mask, hand_norm_gelu, bias):
    config = GPTConfig(vocab_size=300, n_positions=16, n_layer=2, n_head=2, n_embd=32, bias=bias)
    torch.manual_seed(3)
    model = GPT(config)
    torch.manual_seed(3)
    slow = slow_gpt(config, stored_mask=stored_mask, hand_norm_gelu=hand_norm_gelu)
    torch.testing.assert_close(slow.state_dict(), model.state_dict(), rtol=0, atol=0)
    for parameter in slow.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.load_state_dict(slow.state_dict())
    input_ids, targets = torch.randint(300, (2, 3, 12))
    torch.testing.assert_close(slow(input_ids), model(input_ids), rtol=1e-5, atol=1e-5)
    loss = PlainLoss(slow)(input_ids, targets)
    torch.testing.assert_close(loss, model(input_ids, targets), rtol=1e-5, atol=1e-5)
