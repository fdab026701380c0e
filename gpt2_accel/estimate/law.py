"""A scaling law fitted by `study/scaling.py`: its file, the rules by which its runs were trained, its predictions, `--law`.

L(N, D) = E + A/N^alpha + B/D^beta is the loss in nats per token of N parameters after D tokens (Hoffmann et al., 2022,
arXiv:2203.15556, approach 3). N counts all parameters.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from gpt2_accel.config import TrainConfig, load_yaml
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.files import write_json
from gpt2_accel.models import ModelConfig
from gpt2_accel.models.architectures import configured_shape

WIDEST = 8192  # of the sizes among which the best is looked for
# The learning rate falls as width^-WIDTH_EXPONENT, as measured at widths of 32 to 128 with 1M tokens (docs/scaling.md).
WIDTH_EXPONENT = 0.5
BATCH_EXPONENT = 0.383  # the batch grows as tokens^BATCH_EXPONENT
TOKENS, BATCH, WIDTH = 2_000_000, 2048, 64  # at which the base rate and the base decay are meant
WARMUP_SHARE = 0.01  # share of the updates
FEWEST_UPDATES = 20  # of a run that a law can learn from
MAX_EPOCHS = 4.0  # up to which repeated data is about as good as new (Muennighoff et al., 2023, arXiv:2305.16264)
FIXED = {"optimizer": "muon", "lr_schedule": "linear", "min_lr_ratio": 0.0, "beta2": 0.99}
UNKNOWNS = ("E", "A", "alpha", "B", "beta")
LEVEL = 0.05  # probability that the tests of the form refuse one that is right
NOISE = [NormalDist().inv_cdf((k + 0.5) / 50) for k in range(50)]  # a normal distribution


def sizes() -> list[dict[str, int]]:
    """Returns the sizes of a grid as settings, from the smallest: widths in steps of 16 up to 256 and of 64 above, a layer
    per 64 of width but at least two, heads of 16 channels up to a width of 256 and of 64 above."""
    widths = [*range(16, 257, 16), *range(320, WIDEST + 1, 64)]
    return [
        {"n_layer": max(2, round(w / 64)), "n_head": w // (16 if w <= 256 else 64), "n_embd": w}
        for w in widths
    ]


@dataclass(frozen=True)
class Rules:
    """The rules that give a run its settings from its width and its tokens.

    `learning_rate` is the peak at a width of 64 with 2,048 tokens per update, `weight_decay` that with 2M tokens.
    """

    learning_rate: float = 0.0165
    weight_decay: float = 0.3

    def batch(self, tokens: float, length: int) -> int:
        """Returns the tokens per update: they grow as tokens^0.383 (Bergsma et al., 2025, arXiv:2505.13738), rounded to a power
        of two of sequences."""
        sequences = BATCH / length * (tokens / TOKENS) ** BATCH_EXPONENT
        return length * 2 ** max(0, round(math.log2(sequences)))

    def settings(
        self, width: int, tokens: float, length: int, batch: int | None = None
    ) -> dict[str, Any]:
        """Returns the settings of a run of about `tokens` tokens in sequences of `length`, with `batch` tokens per update if
        given.

        The rate grows as the square root of the batch (Malladi et al., 2022, arXiv:2205.10287) and the inverse root of the
        width; the decay grows as the square root of the batch and falls as the tokens, as in nanochat.
        """
        batch = batch or self.batch(tokens, length)
        updates, root = max(1, round(tokens / batch)), math.sqrt(batch / BATCH)
        rate = self.learning_rate * root * (WIDTH / width) ** WIDTH_EXPONENT
        return {
            **FIXED,
            "total_batch_size": batch,
            "max_steps": updates,
            "warmup_steps": round(WARMUP_SHARE * updates),
            "learning_rate": float(f"{rate:.4g}"),
            "weight_decay": float(f"{self.weight_decay * root * TOKENS / tokens:.4g}"),
        }


class Family(NamedTuple):
    """All `sizes` of an architecture: N and the FLOPs per token of each, (sizes,) float64."""

    N: np.ndarray
    flops: np.ndarray


@functools.cache
def family(architecture: str, vocab_size: int, n_positions: int) -> Family:
    """Returns the sizes of an architecture."""
    shapes = [
        configured_shape(
            TrainConfig(architecture=architecture, n_positions=n_positions, **size), vocab_size
        )
        for size in sizes()
    ]
    counts = np.array([float(shape.parameter_count) for shape in shapes])
    return Family(counts, np.array([float(flops_per_token(s, n_positions)) for s in shapes]))


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A/N^alpha + B/D^beta. The parameters are numbers, or arrays of shape (laws, 1) for many laws."""

    E: Any
    A: Any
    alpha: Any
    B: Any
    beta: Any

    def loss(self, N: Any, D: Any) -> Any:
        """Returns the loss in nats per token of N parameters after D tokens."""
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    def best(self, flops: float, sizes: Family) -> Any:
        """Returns the place in `sizes` of the lowest loss with `flops` FLOPs; for many laws an array, (laws,)."""
        return np.argmin(self.loss(sizes.N, flops / sizes.flops), axis=-1)

    def tokens(self, N: float, sizes: Family) -> float:
        """Returns the D at which N is the best size: where both terms fall alike along the curve of equal FLOPs.

        Raises `ValueError` if the law has no such D, because a term is missing.
        """
        if not (self.A > 0 and self.B > 0):
            raise ValueError("the law has no best size, since a term is 0: fit it to more runs")
        # Smooth, without the steps of rounded layers, heads and MLPs.
        curve = np.polynomial.Polynomial.fit(np.log(sizes.N), np.log(sizes.flops), 5)
        slope = curve.deriv()(math.log(N))
        ratio = slope * self.beta * self.B * N**self.alpha / (self.alpha * self.A)
        return math.exp(min(math.log(ratio) / self.beta, 700))


@dataclass(frozen=True)
class Prediction:
    """A predicted val/loss in nats per token with its 95% interval, None for a law whose form does not hold. `extrapolated` is
    the run's FLOPs as a multiple of those of the law's largest run; `other` names what is not as in the law's runs."""

    loss: float
    low: float | None
    high: float | None
    extrapolated: float
    other: tuple[str, ...] = ()

    def __str__(self) -> str:
        sure = "without an interval, since the law does not fit its own runs"
        if self.low is not None:
            sure = f"95% interval {self.low:.4f} to {self.high:.4f}"
        other = f"; the law's runs have another {', '.join(self.other)}" if self.other else ""
        return (
            f"val/loss {self.loss:.4f}, {sure}, {self.extrapolated:.3g} times the FLOPs of the law's largest "
            f"run{other}"
        )


@dataclass(frozen=True)
class FittedLaw:
    """The content of `law.json`.

    `law` has E, A, alpha, B, beta; `samples` are draws of these and of the standard deviation of one run's noise in nats per
    token, from the bootstrap; `spread` is that of the residuals. `form` has the p-values of `law_fit.form_test` by budget and
    by size. `tokenizer` and `data` are fingerprints. `flops` are those of the largest run; `rules` gave the runs their settings.
    """

    law: list[float]
    samples: list[list[float]]
    spread: float
    form: dict[str, float]
    architecture: str
    vocab_size: int
    n_positions: int
    tokenizer: str
    data: str
    flops: float
    rules: dict[str, float]

    @property
    def point(self) -> ScalingLaw:
        return ScalingLaw(*self.law)

    @property
    def drawn(self) -> ScalingLaw:
        """The draws as one law of arrays."""
        return ScalingLaw(*np.array(self.samples).T[:5, :, None])

    @property
    def holds(self) -> bool:
        """Whether no test refuses the form. Without it, intervals have no stated coverage."""
        return bool(self.form) and min(self.form.values()) >= LEVEL / len(self.form)

    @property
    def sizes(self) -> Family:
        return family(self.architecture, self.vocab_size, self.n_positions)

    def interval(self, N: float, D: float) -> tuple[float, float]:
        """Returns the 95% interval of the loss of one run: the uncertainty of the law, and the noise of a run."""
        noise = np.array(self.samples)[:, 5:] * NOISE
        return bootstrap_interval(self.drawn.loss(N, D) + noise)

    def predict(self, shape: ModelConfig, tokens: float) -> Prediction:
        """Returns the prediction for a run, with an interval if the form `holds`."""
        N, each = shape.parameter_count, flops_per_token(shape, self.n_positions)
        low, high = self.interval(N, tokens) if self.holds else (None, None)
        loss = float(self.point.loss(N, tokens))
        return Prediction(loss, low, high, float(each * tokens / self.flops))

    def save(self, path: Path) -> None:
        """Writes the file."""
        write_json(path, asdict(self))


def bootstrap_interval(samples: np.ndarray | Sequence[float]) -> tuple[float, float]:
    """Returns the 95% interval of bootstrap samples of any shape."""
    low, high = np.quantile(samples, (0.025, 0.975))
    return float(low), float(high)


def read_law(path: str | Path) -> FittedLaw:
    """Reads a `law.json`. Raises `FileNotFoundError` if it is missing, `ValueError` if it is no law."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--law {path}: there is no such file, fit one by recipes/scaling_laws.py"
        )
    try:
        law = FittedLaw(**json.loads(Path(path).read_text(encoding="utf-8")))
        if np.shape(law.samples)[1:] != (len(UNKNOWNS) + 1,):
            raise ValueError("draws of another kind")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no law of recipes/scaling_laws.py: give its law.json"
        ) from error
    return law


def follow_law(config: TrainConfig) -> TrainConfig:
    """Returns the settings with those of `config.law`, for the tokens at which the model's size is the best one. A setting
    that was given, or that differs from the recipe's default, stays. A resumed run keeps the settings that it began with, also
    if another fit has replaced the file.

    Raises `ValueError` if the law is for another tokenizer, architecture or sequence length, the model is not new, or the data
    would be read more than `MAX_EPOCHS` times.
    """
    if config.law is None:
        return config
    law = read_law(config.law)
    check_law(law, config)
    given = {
        field.name
        for field in fields(config)
        if getattr(config, field.name) != field.default or field.name in config.given
    }
    settings = ruled_settings(law, config, given)
    begun = Path(config.output_dir) / "config.yaml"
    if config.resume_from is not None and begun.exists():
        saved = load_yaml(str(begun), "config")
        if saved.get("law") == config.law:
            settings = {name: saved[name] for name in settings if name in saved}
    return replace(config, **{n: value for n, value in settings.items() if n not in given})


def check_law(law: FittedLaw, config: TrainConfig) -> None:
    """Raises `ValueError` if a run cannot follow the law."""
    if config.init_from:
        raise ValueError("--law is for a new model: leave out --law or --init_from")
    for what, own, theirs in (
        ("architecture", config.architecture or "gpt2", law.architecture),
        ("sequence_length", config.tokens_per_sequence, law.n_positions),
    ):
        if own != theirs:
            raise ValueError(
                f"{config.law} is for --{what} {theirs}, not {own}: give it, or leave out --law"
            )
    if read_manifest(config.data_dir)["tokenizer"]["fingerprint"] != law.tokenizer:
        raise ValueError(
            f"{config.law} was fitted with another tokenizer than that of {config.data_dir}: fit a law on this data, or leave "
            "out --law"
        )


def ruled_settings(law: FittedLaw, config: TrainConfig, given: set[str]) -> dict[str, Any]:
    """Returns the settings by the law's rules, for the best number of tokens or that of the `given` settings."""
    manifest, rules = read_manifest(config.data_dir), Rules(**law.rules)
    shape = configured_shape(config, manifest["tokenizer"]["vocab_size"])
    batch = config.total_batch_size if "total_batch_size" in given else None
    if batch is None or "max_steps" not in given:
        tokens = law.point.tokens(shape.parameter_count, law.sizes)
        batch = batch or rules.batch(tokens, law.n_positions)
    if "max_steps" in given:
        tokens = config.max_steps * batch
    elif (epochs := tokens / manifest["splits"]["train"]["tokens"]) > MAX_EPOCHS:
        raise ValueError(
            f"{config.law} asks for {tokens:.3g} tokens, {epochs:.3g} times {config.data_dir}, and knows no repetition: "
            "prepare more text, train a smaller model, or give --max_steps"
        )
    return rules.settings(shape.n_embd, tokens, law.n_positions, batch)


def prediction(config: TrainConfig, shape: ModelConfig) -> Prediction | None:
    """Returns what `config.law` predicts for a run, None without a law."""
    if config.law is None:
        return None
    law, batch = read_law(config.law), config.total_batch_size
    tokens = config.max_steps * batch
    ruled = Rules(**law.rules).settings(shape.n_embd, tokens, law.n_positions, batch) | {
        "dropout": 0.0
    }
    own = {name: getattr(config, name) for name in ruled}
    other = [
        name  # up to the rounding of tokens to whole updates
        for name, value in ruled.items()
        if own[name] != value
        and (isinstance(value, str) or not math.isclose(own[name], value, rel_tol=0.05))
    ]
    other += ["text"] * (data_fingerprint(config.data_dir) != law.data)
    return replace(law.predict(shape, tokens), other=tuple(other))
