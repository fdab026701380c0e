"""The architectures by name, `--architecture`: `models/NAME.py` has the model and its `CONFIG`."""

from importlib import import_module

from gpt2_accel.models import ModelConfig, layers_heads_width


def config_class(name: str | None) -> type[ModelConfig]:
    """Returns the config of an architecture in `config.ARCHITECTURES`; None is GPT-2."""
    return import_module(f"gpt2_accel.models.{name or 'gpt2'}").CONFIG


def configured_shape(settings: object, vocab_size: int) -> ModelConfig:
    """Returns the shape that a `TrainConfig` describes. Raises `ValueError` for settings that the architecture does not
    have."""
    return config_class(settings.architecture).from_settings(settings, vocab_size)


def check_loaded(settings: object, shape: ModelConfig) -> None:
    """Raises `ValueError` if a `TrainConfig` asks for another architecture or depth than its `init_from` has."""
    if settings.architecture not in (None, shape.architecture):
        raise ValueError(
            f"{settings.init_from} is no {settings.architecture}: leave out --architecture, or choose another "
            "--init_from"
        )
    n_layer, _, n_embd = layers_heads_width(settings)
    if settings.depth and (shape.n_layer, shape.n_embd) != (n_layer, n_embd):
        raise ValueError(
            f"--depth {settings.depth} is for a new model, and {settings.init_from} has {shape.n_layer} layers of width "
            f"{shape.n_embd}: leave out --depth or --init_from"
        )
