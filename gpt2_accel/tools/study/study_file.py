"""What a user gives to a study: the options of its command, and a YAML file, which docs/studies.md describes."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2_accel.config import check_ranges, load_yaml, setting
from gpt2_accel.runtime.options import suggestion
from gpt2_accel.tools.study import children

if TYPE_CHECKING:
    from gpt2_accel.tools.study.engine import Engine

METRICS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
UNITS = ("tokens", "flops")
OWN = ("output_dir", "resume_from", "seed", "max_steps", "epochs")  # which the study sets
WARMUP = "warmup_share"  # of the updates, in place of warmup_steps
KINDS = {dict: "`name: value` lines", str: "a text", int: "a number"}


@dataclass
class StudyOptions:
    """Options that a study's recipe has beside its own. Raises `ValueError` for a value out of its range."""

    output_dir: str | None = setting(None, "folder of the study; default runs/<its name>")
    processes: int | None = setting(None, "runs at a time; default one per GPU, or per CPU core")
    keep_models: bool = setting(False, "keep the weights and checkpoints of recorded runs")
    dry_run: bool = setting(False, "print the runs, their FLOPs and hours, then exit")

    def __post_init__(self) -> None:
        check_ranges(self, positive="processes")
        count = int(os.environ.get("WORLD_SIZE", 1))
        if count > 1:
            raise ValueError(
                f"the launch has {count} processes: a study has one, and starts a run on each GPU itself"
            )

    def engine(self, folder: str) -> "Engine":
        """Returns the engine of a study in `output_dir`, by default `folder`."""
        children.prepare()
        from gpt2_accel.tools.study.engine import Engine  # after the fork server: it imports torch

        found = children.slots(self.processes)
        return Engine(Path(self.output_dir or folder), found, self.keep_models)


@dataclass
class StudyFile:
    """The content of a study's YAML file. The first variant is the baseline. `recipe` is its name or path, as `read_study` finds it
    a `Path`.

    Raises `ValueError` for what a study cannot have.
    """

    recipe: str
    variants: dict
    settings: dict = field(default_factory=dict)
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
        self.baseline = next(iter(self.variants))
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        check_ranges(self, positive="seeds")
        self.unit, self.budgets = read_budgets(self.budget)
        check_settings("settings", self.settings)
        check_settings("tune", self.tune)
        for name, own in self.variants.items():
            check_settings(name, own)
            for fixed in own.keys() & self.tune.keys():
                raise ValueError(
                    f"{name} sets {fixed}, which tune also sets: leave it out of one of them"
                )
        for name, values in self.tune.items():
            if not isinstance(values, list) or len(values) < 2:
                raise ValueError(
                    f"tune: {name} is {values!r}: give each setting a list of values; all combinations are trained"
                )

    def changes(self, variant: str, tuned: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that a variant changes: those that tuning chose and its own, over those of all. Raises
        `ValueError` for two warmups, or one that is out of range."""
        both = self.settings | self.variants[variant] | tuned
        share = both.get(WARMUP, 0)
        if WARMUP in both and "warmup_steps" in both:
            raise ValueError(f"warmup_steps and {WARMUP} are both set: leave one out")
        if not isinstance(share, float | int) or not 0 <= share <= 1:
            raise ValueError(f"{WARMUP} is {share!r}: give a number from 0 to 1")
        return both


def read_study(path: Path, recipes: Path) -> StudyFile:
    """Reads a study's YAML file; a recipe without a slash is one of the folder `recipes`.

    Raises `FileNotFoundError` if it or the recipe is missing, `ValueError` for anything that it cannot hold.
    """
    values = {"recipe": None, "variants": None} | load_yaml(str(path), "STUDY.yaml")
    names = [part.name for part in fields(StudyFile)]
    try:
        for name in values:
            if name not in names:
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


def read_budgets(budget: Mapping[str, Any]) -> tuple[str, list[float | None]]:
    """Returns the unit of the budgets, and the budgets from the smallest; [None] for the recipe's own length of a run."""
    if not budget:
        return "", [None]
    if len(budget) > 1 or not budget.keys() <= {*UNITS}:
        raise ValueError(f"budget has {', '.join(map(str, budget))}: give {' or '.join(UNITS)}")
    [(unit, amounts)] = budget.items()
    try:
        found = np.unique(np.array(amounts, float)).tolist()  # YAML reads 1e6 as a text
    except (TypeError, ValueError):
        found = []
    if not (found and found[0] > 0 and found[-1] < math.inf):
        raise ValueError(f"budget is {amounts!r}: give numbers above 0")
    return unit, found
