"""Reads the YAML file of a study, which docs/studies.md describes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gpt2_accel.config import TrainConfig, check_ranges, load_yaml, parse_config
from gpt2_accel.runtime.options import suggestion
from gpt2_accel.tools.study.trials import WARMUP, as_words

METRICS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
UNITS = ("tokens", "flops")
OWN = ("output_dir", "resume_from", "seed", "max_steps", "epochs")  # which the study sets
KINDS = {dict: "`name: value` lines", str: "a text", int: "a number"}


@dataclass
class StudyFile:
    """The content of a study's YAML file. `recipe` is its name or path, as `read_study` finds it a `Path`.

    Raises `ValueError` for what a study cannot have.
    """

    recipe: str
    variants: dict
    settings: dict = field(default_factory=dict)
    baseline: str = ""
    budget: dict = field(default_factory=dict)
    seeds: int = 3
    metric: str = "loss"
    tune: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in fields(self):
            check_kind(part.name, getattr(self, part.name), part.type)
        if not self.variants:
            raise ValueError("variants is empty: name at least one, such as `as_it_is: {}`")
        self.variants = {str(name): own or {} for name, own in self.variants.items()}
        for name, own in {"settings": self.settings, **self.variants}.items():
            check_settings(name, own)
        self.baseline = self.baseline or next(iter(self.variants))
        for name, choices in {"baseline": self.variants, "metric": METRICS}.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        check_ranges(self, positive="seeds")
        self.unit, self.budgets = read_budgets(self.budget)
        self.tune = read_tuning(self.tune)
        for name, own in self.variants.items():
            if fixed := sorted(own.keys() & self.tune.keys()):
                raise ValueError(
                    f"{name} sets {fixed[0]}, which tune also sets: leave it out of one of them"
                )


def read_study(path: Path, recipes: Path) -> StudyFile:
    """Reads a study's YAML file; a recipe without a slash is one of the folder `recipes`.

    Raises `FileNotFoundError` if it or the recipe is missing, `ValueError` for anything that it cannot hold.
    """
    values = {"recipe": None, "variants": None, **load_yaml(str(path), "STUDY.yaml")}
    try:
        names = [part.name for part in fields(StudyFile)]
        for name in values.keys() - {*names}:
            raise ValueError(f"unknown part {name!r}{suggestion(str(name), names, '')}")
        study = StudyFile(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    is_path = "/" in study.recipe or study.recipe.endswith(".py")
    study.recipe = Path(study.recipe) if is_path else recipes / f"{study.recipe}.py"
    if not study.recipe.is_file():
        raise FileNotFoundError(f"{path}: there is no recipe {study.recipe}")
    return study


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises `ValueError` if a value is of another kind than one of `KINDS`."""
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, expected {KINDS[kind]}")


def check_settings(where: str, own: Any) -> None:
    """Raises `ValueError` for settings that a study cannot give a run."""
    check_kind(where, own, dict)
    for name in OWN:
        if name in own:
            raise ValueError(f"{where} sets {name}, which the study sets: leave it out")
    if WARMUP in own:
        typed(WARMUP, own[WARMUP])


def read_budgets(budget: Mapping[str, Any]) -> tuple[str, list[float | None]]:
    """Returns the unit of the budgets, and the budgets from the smallest; [None] for the recipe's own length of a run."""
    if not budget:
        return "", [None]
    [(unit, amounts), *more] = budget.items()
    if more or unit not in UNITS:
        raise ValueError(f"budget has {', '.join(map(str, budget))}: give {' or '.join(UNITS)}")
    try:  # YAML reads 1e6 as a text
        found = {float(amount) for amount in (amounts if isinstance(amounts, list) else [amounts])}
    except (TypeError, ValueError):
        found = set()
    if not found or not all(0 < amount < math.inf for amount in found):
        raise ValueError(f"budget is {amounts!r}: give numbers above 0")
    return unit, sorted(found)


def read_tuning(tune: Mapping[str, Any]) -> dict[str, list]:
    """Returns the values to try by setting. Raises `ValueError` for what is no list, or not possible."""
    check_settings("tune", dict.fromkeys(tune, 0))
    for name, values in tune.items():
        if not isinstance(values, list) or len(values) < 2:
            raise ValueError(
                f"tune: {name} is {values!r}: give each setting a list of values; all combinations are trained"
            )
    return {name: [typed(name, value) for value in values] for name, values in tune.items()}


def typed(name: str, value: Any) -> Any:
    """Returns a YAML value of a setting in the type that a run has it in. Raises `ValueError` for one that is out of range."""
    if name != WARMUP:
        return getattr(parse_config(TrainConfig, [f"--{name}", *as_words(name, value)]), name)
    if not isinstance(value, float | int) or not 0 <= value <= 1:
        raise ValueError(f"{WARMUP} is {value!r}: give a number from 0 to 1")
    return value
