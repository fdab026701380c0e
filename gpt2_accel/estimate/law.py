"""A scaling law fitted by `study/scaling.py`: its file, the rules by which its runs were trained, and its predictions.

L(N, D) = E + A/N^alpha + B/D^beta is the loss in nats per token of N parameters after D tokens (Hoffmann et al., 2022,
arXiv:2203.15556, approach 3).
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2_accel.config import TrainConfig, load_yaml
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.files import write_json
from gpt2_accel.models import ModelConfig
from gpt2_accel.models.architectures import configured_shape

WIDEST = 8192  # of the sizes among which the best is looked for
POINTS = 2000  # between the smallest and the largest size, at which the best is looked for
# The learning rate falls as width^-WIDTH_EXPONENT, as measured at widths of 32 to 128 with 1M tokens (docs/scaling.md).
WIDTH_EXPONENT = 0.5
BATCH_EXPONENT = 0.383  # the batch grows as tokens^BATCH_EXPONENT
TOKENS, BATCH, WIDTH = 2_000_000, 2048, 64  # at which the base rate and the base decay are meant
WARMUP_SHARE = 0.01  # share of the updates
FEWEST_UPDATES = 20  # of a run that a law can learn from, or decide on
MAX_EPOCHS = 4.0  # up to which repeated data is about as good as new (Muennighoff et al., 2023, arXiv:2305.16264)
FIXED = {"optimizer": "muon", "lr_schedule": "linear", "min_lr_ratio": 0.0, "beta2": 0.99}
NORMAL = 1.96  # half the width of the 95% interval of a normal distribution, in standard deviations


def sizes() -> list[dict[str, int]]:
    """Returns the sizes of a grid as settings, from the smallest: widths in steps of 16 up to 256 and of 64 above, a layer
    per 64 of width but at least two, heads of 16 channels up to a width of 256 and of 64 above."""
    widths = [*range(16, 257, 16), *range(320, WIDEST + 1, 64)]
    return [
        {
            "n_layer": max(2, round(width / 64)),
            "n_head": width // (16 if width <= 256 else 64),
            "n_embd": width,
        }
        for width in widths
    ]


def parameters(shape: ModelConfig, embeddings: bool) -> int:
    """Returns N: all parameters, or without `embeddings` those of the blocks."""
    if embeddings:
        return shape.parameter_count
    return replace(shape, n_layer=2 * shape.n_layer).parameter_count - shape.parameter_count


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

    @property
    def log_flops(self) -> np.polynomial.Polynomial:
        """log FLOPs per token as a smooth function of log N, without the steps of rounded layers, heads and MLPs."""
        return np.polynomial.Polynomial.fit(np.log(self.N), np.log(self.flops), 5)


@functools.cache
def family(architecture: str, vocab_size: int, n_positions: int, embeddings: bool) -> Family:
    """Returns the sizes of an architecture, with N counted with or without `embeddings`."""
    shapes = [shape_of(size, architecture, vocab_size, n_positions) for size in sizes()]
    return Family(
        np.array([float(parameters(shape, embeddings)) for shape in shapes]),
        np.array([float(flops_per_token(shape, n_positions)) for shape in shapes]),
    )


def shape_of(
    size: dict[str, int], architecture: str, vocab_size: int, n_positions: int
) -> ModelConfig:
    """Returns the shape of one of `sizes`."""
    settings = TrainConfig(architecture=architecture, n_positions=n_positions, **size)
    return configured_shape(settings, vocab_size)


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

    def best(self, flops: float, sizes: Family) -> tuple[Any, Any]:
        """Returns N and D of the lowest loss with `flops` FLOPs, between the smallest and the largest of `sizes`."""
        N = np.geomspace(sizes.N.min(), sizes.N.max(), POINTS)
        each = np.exp(sizes.log_flops(np.log(N)))
        chosen = np.argmin(self.loss(N, flops / each), axis=-1)
        return N[chosen], flops / each[chosen]

    def tokens(self, N: float, sizes: Family) -> float:
        """Returns the D at which N is the best size: where both terms fall alike along the curve of equal FLOPs.

        Raises `ValueError` if the law has no such D, because a term is missing.
        """
        if not (self.A > 0 and self.B > 0):
            raise ValueError("the law has no best size, since a term is 0: fit it to more runs")
        slope = sizes.log_flops.deriv()(math.log(N))
        ratio = slope * self.beta * self.B * N**self.alpha / (self.alpha * self.A)
        return math.exp(min(math.log(ratio) / self.beta, 700))


@dataclass(frozen=True)
class Prediction:
    """A predicted val/loss in nats per token with its 95% interval; `extrapolated` is the run's FLOPs as a multiple of those
    of the largest run behind the law, `held_out` is that of `FittedLaw`. `other` names what is not as in the law's runs."""

    loss: float
    low: float
    high: float
    extrapolated: float
    held_out: float | None = None
    other: tuple[str, ...] = ()

    def __str__(self) -> str:
        far = f", {self.extrapolated:.3g} times the FLOPs of the law's largest run"
        if self.held_out is not None:
            far += f", whose budget lies {off(self.held_out)} what a law of the smaller budgets predicts"
        other = f"; the law's runs have another {', '.join(self.other)}" if self.other else ""
        return (
            f"val/loss {self.loss:.4f}, 95% interval {self.low:.4f} to {self.high:.4f}{far}{other}"
        )


@dataclass(frozen=True)
class FittedLaw:
    """The content of `law.json`.

    `law` has E, A, alpha, B, beta; `samples` are its bootstrap samples; `embeddings` says whether N counts embeddings;
    `spread` is the standard deviation of the residuals in nats per token. `tokenizer` and `data` are fingerprints. `N`, `D`
    and `flops` are the lowest and the highest of the runs; `rules` gave them their settings. `held_out` is the mean of the
    measured less the predicted loss of the largest budget's runs, by a law of the smaller budgets; None with too few of them.
    """

    law: list[float]
    samples: list[list[float]]
    spread: float
    embeddings: bool
    architecture: str
    vocab_size: int
    n_positions: int
    tokenizer: str
    data: str
    N: list[float]
    D: list[float]
    flops: list[float]
    rules: dict[str, float]
    held_out: float | None = None

    @property
    def point(self) -> ScalingLaw:
        return ScalingLaw(*self.law)

    @property
    def drawn(self) -> ScalingLaw:
        """The bootstrap samples as one law of arrays."""
        return ScalingLaw(*np.array(self.samples).T[:, :, None])

    @property
    def sizes(self) -> Family:
        return family(self.architecture, self.vocab_size, self.n_positions, self.embeddings)

    def predict(self, shape: ModelConfig, tokens: float) -> Prediction:
        """Returns the prediction for a run: the interval covers the law's uncertainty and the spread of one run."""
        N, each = parameters(shape, self.embeddings), flops_per_token(shape, self.n_positions)
        loss = float(self.point.loss(N, tokens))
        low, high = bootstrap_interval(self.drawn.loss(N, tokens))
        half = NORMAL * self.spread
        return Prediction(
            loss,
            loss - math.hypot(loss - min(low, loss), half),
            loss + math.hypot(max(high, loss) - loss, half),
            float(each * tokens / self.flops[1]),
            self.held_out,
        )

    def save(self, path: Path) -> None:
        """Writes the file."""
        write_json(path, asdict(self))


def off(error: float) -> str:
    """Describes a measured less a predicted loss: 0.086 nats below."""
    return f"{abs(error):.3f} nats {'below' if error < 0 else 'above'}"


def bootstrap_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% interval of bootstrap samples."""
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
        numbers = np.array([law.law, *law.samples], dtype=float)
        others = np.array(
            [law.spread, *law.flops, law.rules["learning_rate"], law.rules["weight_decay"]]
        )
        assert numbers.shape[1:] == (5,) and len(numbers) > 1 and len(law.flops) == 2
        assert (numbers >= 0).all() and (numbers[:, [2, 4]] > 0).all() and law.flops[1] > 0
        assert np.isfinite(numbers).all() and np.isfinite(others).all() and (others >= 0).all()
        assert isinstance(law.embeddings, bool) and len(law.rules) == 2 and law.sizes
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise ValueError(
            f"{path} is no law of recipes/scaling_laws.py: give its law.json"
        ) from error
    return law


def follow_law(config: TrainConfig) -> TrainConfig:
    """Returns the settings with those of `config.law`, for the tokens at which the model's size is the best one. A setting
    that was given, or that differs from the recipe's default, stays; so do those of a run that is resumed.

    Raises `ValueError` if the law is for another tokenizer, architecture or sequence length, the model is not new, the data
    would be read more than `MAX_EPOCHS` times, or there would be fewer than `FEWEST_UPDATES`.
    """
    if config.law is None:
        return config
    law = read_law(config.law)
    check_law(law, config)
    given = {
        field.name: value
        for field in fields(config)
        if (value := getattr(config, field.name)) != field.default or field.name in config.given
    }
    settings = begun_settings(config) or ruled_settings(law, config, given)
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


def ruled_settings(law: FittedLaw, config: TrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings by the law's rules, for the best number of tokens or that of the `given` settings."""
    manifest, rules = read_manifest(config.data_dir), Rules(**law.rules)
    shape = configured_shape(config, manifest["tokenizer"]["vocab_size"])
    updates, batch = given.get("max_steps"), given.get("total_batch_size")
    if updates is None or batch is None:
        tokens = law.point.tokens(parameters(shape, law.embeddings), law.sizes)
        epochs = tokens / manifest["splits"]["train"]["tokens"]
        if updates is None and epochs > MAX_EPOCHS:
            raise ValueError(
                f"{config.law} asks for {tokens:.3g} tokens, {epochs:.3g} times {config.data_dir}, and knows no repetition: "
                "prepare more text, train a smaller model, or give --max_steps"
            )
        batch = batch or rules.batch(tokens, law.n_positions)
    if updates is not None:
        tokens = updates * batch
    settings = rules.settings(shape.n_embd, tokens, law.n_positions, batch)
    if settings["max_steps"] < FEWEST_UPDATES and updates is None:
        raise ValueError(
            f"{config.law} asks for {tokens:,.0f} tokens, fewer than {FEWEST_UPDATES} updates: lower --total_batch_size, train a "
            "larger model, or give --max_steps"
        )
    return settings


def begun_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that a law gave the run which `config` resumes, empty for a new run: another fit, into the same
    file, does not change a run that has begun."""
    path = Path(config.output_dir) / "config.yaml"
    if config.resume_from is None or not path.exists():
        return {}
    saved = load_yaml(str(path), "config")
    names = Rules().settings(WIDTH, TOKENS, 1)
    return {n: saved[n] for n in names if n in saved} if saved.get("law") == config.law else {}


def prediction(config: TrainConfig, shape: ModelConfig) -> Prediction | None:
    """Returns what `config.law` predicts for a run, None without a law."""
    if config.law is None:
        return None
    law, tokens = read_law(config.law), config.max_steps * config.total_batch_size
    ruled = Rules(**law.rules).settings(
        shape.n_embd, tokens, law.n_positions, config.total_batch_size
    )
    other = [name for name, value in ruled.items() if not about(getattr(config, name), value)]
    other += ["dropout"] * (config.dropout > 0)
    other += ["text"] * (data_fingerprint(config.data_dir) != law.data)
    return replace(law.predict(shape, tokens), other=tuple(other))


def about(own: str | float, ruled: str | float) -> bool:
    """Whether a setting is what a rule gives, up to the rounding of tokens to whole updates."""
    return own == ruled if isinstance(ruled, str) else math.isclose(own, ruled, rel_tol=0.05)
