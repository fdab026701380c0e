"""The architectures by name, `--architecture`."""

from gpt2_accel.models import ModelConfig
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.models.qwen3 import Qwen3Config

CONFIGS = {"gpt2": GPTConfig, "qwen3": Qwen3Config}


def configured_shape(settings: object, vocab_size: int) -> ModelConfig:
    """Returns the shape that a `TrainConfig` describes. Raises `ValueError` for settings that the architecture does not
    have."""
    return CONFIGS[settings.architecture].from_settings(settings, vocab_size)
