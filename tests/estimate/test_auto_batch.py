"""The memory estimate of a micro-batch."""

import pytest
from accelerate import Accelerator

from gpt2_accel.config import TrainConfig
from gpt2_accel.device import OVERRIDES
from gpt2_accel.estimate.auto_batch import compute_size
from gpt2_accel.estimate.memory import activation_bytes
from gpt2_accel.models.gpt2 import GPTConfig

SHAPE = GPTConfig(vocab_size=256, n_positions=128, n_layer=8, n_head=2, n_embd=64)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_micro_batch_fits_if_its_estimated_memory_is_free(checkpointed, monkeypatch):
    config = TrainConfig(sequence_length=128, checkpoint_activations=checkpointed)
    model, accelerator = SHAPE.build(), Accelerator(cpu=True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    needed = 12 * weights + activation_bytes(SHAPE, 8, 128, "no", checkpointed)
    for free, fits in ((needed / 0.9 + 1000, True), (needed / 0.9 - 1000, False)):
        monkeypatch.setenv(OVERRIDES, f'{{"free_memory": {int(free)}}}')
        assert compute_size(config, accelerator, model, 8) is fits


def test_checkpointed_activations_need_less_than_half():
    plain, checkpointed = (activation_bytes(SHAPE, 8, 128, "no", flag) for flag in (False, True))
    assert checkpointed < plain / 2
