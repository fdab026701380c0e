"""A scaling law that `study/scaling.py` fitted: its file, the settings of its runs, its predictions, `--law`.

L(N, D) = E + A/N^alpha + B/D^beta is the loss in nats per token of N parameters after D tokens (Hoffmann et al., 2022,
arXiv:2203.15556, approach 3). N counts all parameters.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from gpt2_accel.config import TrainConfig, load_yaml
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.models import ModelConfig
from gpt2_accel.models.architectures import configured_shape

# At a width of 64 and 2,048 tokens per update. It falls as width^-WIDTH_EXPONENT, as measured at widths of 32 to 128 with 1M
# tokens (docs/scaling.md).
LEARNING_RATE, WIDTH_EXPONENT = 0.0165, 0.5
WEIGHT_DECAY = 0.3  # of a run of 2M tokens with 2,048 per update
BATCH_EXPONENT = 0.383  # the batch grows as tokens^BATCH_EXPONENT
TOKENS, BATCH, WIDTH = 2_000_000, 2048, 64  # at which rate, decay and batch are meant
WARMUP_SHARE = 0.01  # share of the updates
MAX_EPOCHS = 4.0  # up to which repeated data is about as good as new (Muennighoff et al., 2023, arXiv:2305.16264)
FIXED = {"optimizer": "muon", "lr_schedule": "linear", "min_lr_ratio": 0.0, "beta2": 0.99}
UNKNOWNS = ("E", "A", "alpha", "B", "beta")
LEVEL = 0.05  # probability that the tests of the form refuse one that is right
NOISE = [NormalDist().inv_cdf((k + 0.5) / 50) for k in range(50)]  # a normal distribution


def batch_for(tokens: float, length: int) -> int:
    """Returns the tokens per update of a run of `tokens` tokens in sequences of `length`: they grow as tokens^0.383 (Bergsma et
    al., 2025, arXiv:2505.13738), rounded to a power of two of sequences."""
    sequences = BATCH / length * (tokens / TOKENS) ** BATCH_EXPONENT
    return length * 2 ** max(0, round(math.log2(sequences)))


def settings_for(width: int, tokens: float, batch: int, learning_rate: float) -> dict[str, Any]:
    """Returns the settings of a run of about `tokens` tokens, `batch` of them per update. `learning_rate` is the peak at a width
    of 64 with 2,048 tokens per update.

    The rate grows as the square root of the batch (Malladi et al., 2022, arXiv:2205.10287) and the inverse root of the
    width; the decay grows as the square root of the batch and falls as the tokens, as in nanochat.
    """
    updates, root = max(1, round(tokens / batch)), math.sqrt(batch / BATCH)
    rate = learning_rate * root * (WIDTH / width) ** WIDTH_EXPONENT
    return {
        **FIXED,
        "total_batch_size": batch,
        "max_steps": updates,
        "warmup_steps": round(WARMUP_SHARE * updates),
        "learning_rate": float(f"{rate:.4g}"),
        "weight_decay": float(f"{WEIGHT_DECAY * root * TOKENS / tokens:.4g}"),
    }


def loss_of(law: Sequence, N: Any, D: Any) -> Any:
    """Returns the loss in nats per token of N parameters after D tokens. `law` is E, A, alpha, B, beta: numbers, or arrays of
    shape (laws, 1) for many laws."""
    E, A, alpha, B, beta = law
    return E + A * N**-alpha + B * D**-beta


def bootstrap_interval(samples: np.ndarray) -> tuple[float, float]:
    """Returns the 95% interval of bootstrap samples of any shape."""
    low, high = np.quantile(samples, (0.025, 0.975))
    return float(low), float(high)


def holds(form: Mapping[str, float]) -> bool:
    """Whether no test refuses a law's form, by the tests' p-values. Without it, intervals have no stated coverage."""
    return bool(form) and min(form.values()) >= LEVEL / len(form)


@dataclass(frozen=True)
class Prediction:
    """A predicted val/loss in nats per token with its 95% interval, None for a law whose form does not hold. `extrapolated` is
    the run's FLOPs as a multiple of those of the law's largest run. It is for the settings and the text of the law's runs."""

    loss: float
    low: float | None
    high: float | None
    extrapolated: float

    def __str__(self) -> str:
        sure = "without an interval, since the law does not fit its own runs"
        if self.low is not None:
            sure = f"95% interval {self.low:.4f} to {self.high:.4f}"
        return (
            f"val/loss {self.loss:.4f}, {sure}, with {self.extrapolated:.3g} times the FLOPs of the law's largest run, by its "
            "settings and on its text"
        )


@dataclass(frozen=True)
class FittedLaw:
    """The content of `law.json`.

    `law` has E, A, alpha, B, beta; `samples` are draws of these and of the standard deviation of one run's noise in nats per
    token, from the bootstrap; `spread` is that of the residuals. `form` has the p-values of `law_fit.form_test` by budget and
    by size. `tokenizer` is a fingerprint. `flops` are those of the largest run; `learning_rate` is the one of `settings_for`.
    """

    law: list[float]
    samples: list[list[float]]
    spread: float
    form: dict[str, float]
    architecture: str
    n_positions: int
    tokenizer: str
    flops: float
    learning_rate: float

    @property
    def has_best(self) -> bool:
        """Whether a number of FLOPs has a best size: no term is missing."""
        _, A, _, B, _ = self.law
        return A > 0 and B > 0

    def tokens(self, N: float) -> float:
        """Returns the D at which N is the best size, with FLOPs in proportion to N·D (Hoffmann et al., 2022, eq. 4).

        Raises `ValueError` if the law has no such D, because a term is missing.
        """
        _, A, alpha, B, beta = self.law
        if not self.has_best:
            raise ValueError("the law has no best size, since a term is 0: fit it to more runs")
        return math.exp(min(math.log(beta * B * N**alpha / (alpha * A)) / beta, 700))

    def predict(self, N: float, D: float, flops: float) -> Prediction:
        """Returns the prediction for a run of N parameters, D tokens and `flops` FLOPs, with the interval of one run if the form
        `holds`: the uncertainty of the law, and the noise of a run."""
        low = high = None
        if holds(self.form):
            *drawn, noise = np.array(self.samples).T[:, :, None]
            low, high = bootstrap_interval(loss_of(drawn, N, D) + noise * NOISE)
        return Prediction(float(loss_of(self.law, N, D)), low, high, flops / self.flops)


def read_law(path: str) -> FittedLaw:
    """Reads a `law.json`. Raises `FileNotFoundError` if it is missing, `ValueError` if it is no law."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--law {path}: there is no such file, fit one by recipes/scaling_laws.py"
        )
    try:
        return FittedLaw(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no law of this release: give the law.json of recipes/scaling_laws.py"
        ) from error


def follow_law(config: TrainConfig) -> TrainConfig:
    """Returns the settings with those of `config.law`, for the tokens at which the model's size is the best one. A setting
    that was given, or that differs from the recipe's default, stays. A resumed run keeps the settings that it began with, also
    if another fit has replaced the file.

    Raises `ValueError` if the law is for another tokenizer, architecture or sequence length, the model is not new, or the data
    would be read more than `MAX_EPOCHS` times.
    """
    if config.law is None:
        return config
    if config.init_from:
        raise ValueError("--law is for a new model: leave out --law or --init_from")
    law, tokenizer = read_law(config.law), read_manifest(config.data_dir)["tokenizer"]
    own = config.architecture or "gpt2", config.tokens_per_sequence, tokenizer["fingerprint"]
    theirs = law.architecture, law.n_positions, law.tokenizer
    if own != theirs:
        form = "{} with sequences of {} tokens of the tokenizer {:.8}"
        raise ValueError(
            f"{config.law} is for {form.format(*theirs)}, not for {form.format(*own)}: give the same, or leave out --law"
        )
    given = {
        field.name
        for field in fields(config)
        if getattr(config, field.name) != field.default or field.name in config.given
    }
    settings = settings_by(law, config, given)
    begun = Path(config.output_dir) / "config.yaml"
    if config.resume_from is not None and begun.exists():
        settings |= {n: v for n, v in load_yaml(str(begun), "config").items() if n in settings}
    return replace(config, **{n: value for n, value in settings.items() if n not in given})


def settings_by(law: FittedLaw, config: TrainConfig, given: set[str]) -> dict[str, Any]:
    """Returns the settings by a law, for the best number of tokens or that of the `given` settings."""
    manifest = read_manifest(config.data_dir)
    shape = configured_shape(config, manifest["tokenizer"]["vocab_size"])
    tokens = law.tokens(shape.parameter_count)
    batch = batch_for(tokens, law.n_positions)
    if "total_batch_size" in given:
        batch = config.total_batch_size
    if "max_steps" in given:
        tokens = config.max_steps * batch
    elif (epochs := tokens / manifest["splits"]["train"]["tokens"]) > MAX_EPOCHS:
        raise ValueError(
            f"{config.law} asks for {tokens:.3g} tokens, {epochs:.3g} times {config.data_dir}, and knows no repetition: "
            "prepare more text, train a smaller model, or give --max_steps"
        )
    return settings_for(shape.n_embd, tokens, batch, law.learning_rate)


def prediction(config: TrainConfig, shape: ModelConfig) -> Prediction | None:
    """Returns what `config.law` predicts for a run, None without a law."""
    if config.law is None:
        return None
    tokens = config.max_steps * config.total_batch_size
    flops = float(tokens * flops_per_token(shape, config.tokens_per_sequence))
    return read_law(config.law).predict(shape.parameter_count, tokens, flops)
