"""The architectures by name, `--architecture`: `models/NAME.py` has the model and its `CONFIG`."""

from importlib import import_module

from gpt2_accel.models import ModelConfig


def config_class(name: str | None) -> type[ModelConfig]:
    """Returns the config of an architecture in `config.ARCHITECTURES`; None is GPT-2."""
    return import_module(f"gpt2_accel.models.{name or 'gpt2'}").CONFIG


def configured_shape(settings: object, vocab_size: int) -> ModelConfig:
    """Returns the shape that a `TrainConfig` describes. Raises `ValueError` for settings that the architecture does not
    have."""
    return config_class(settings.architecture).from_settings(settings, vocab_size)


def check_loaded(settings: object, shape: ModelConfig) -> None:
    """Raises `ValueError` if a `TrainConfig` asks for another architecture or depth than its `init_from` has."""
    found = shape.architecture, shape.n_layer
    if found != (settings.architecture or found[0], settings.depth or found[1]):
        raise ValueError(
            f"{settings.init_from} is a {found[0]} with n_layer = {found[1]}: leave out --architecture and --depth, which are "
            "for a new model, or --init_from"
        )
