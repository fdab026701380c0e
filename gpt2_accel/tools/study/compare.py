"""Compares variants of a recipe: paired seeds, equal budgets, optional tuning, differences from the
baseline with intervals. docs/studies.md describes the YAML file of a study.
"""

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from scipy.stats import sem, t

from gpt2_accel.config import load_yaml
from gpt2_accel.evals.results import markdown
from gpt2_accel.tools.study.runs import Runs, Trial, read_trial

OWN = {"output_dir", "resume_from", "seed", "max_steps", "epochs"}  # settings that the study sets


@dataclass
class Study:
    """The content of a study's YAML file. The first variant is the baseline.

    `unit` is "tokens" or "flops"; `budgets` are ascending; "" and [0] for the recipe's own
    `max_steps`. `grid` has each combination of the values to tune. Raises `ValueError` for a value
    that a study cannot have.
    """

    recipe: str
    variants: dict[str, dict]
    settings: dict
    budget: dict
    seeds: int
    metric: str
    tune: dict[str, list]

    def __post_init__(self) -> None:
        self.variants = {str(name): own or {} for name, own in self.variants.items()}
        for kind, parts in ((dict, self.variants), (list, self.tune)):
            for name, own in parts.items():
                if not isinstance(own, kind) or own == []:
                    raise ValueError(
                        f"{name} is {own!r}: a variant has `name: value` lines, tune has lists"
                    )
        if not self.variants or self.seeds < 1 or self.metric not in ("loss", "bits_per_byte"):
            raise ValueError(
                "give a variant, such as `baseline: {}`, at least one seed, and the metric loss or "
                "bits_per_byte"
            )
        (self.unit, amounts), *more = list(self.budget.items()) or [("", 0)]
        self.budgets = np.unique(np.array(amounts, float)).tolist()  # YAML reads 1e6 as text
        wrong = more or self.unit not in ("tokens", "flops") or min(self.budgets, default=0) <= 0
        if self.budget and wrong:
            raise ValueError(f"budget is {self.budget}: give tokens or flops, numbers above 0")
        combinations = product(*self.tune.values())
        self.grid = [dict(zip(self.tune, values, strict=True)) for values in combinations]


EMPTY = Study("", {"baseline": {}}, {}, {}, 3, "loss", {})


def read_study(path: Path, recipes: Path) -> Study:
    """Reads a study's YAML file. A recipe that is not a `.py` file is one of the folder `recipes`.

    Raises `FileNotFoundError` if the file or the recipe is missing, `ValueError` for wrong values.
    """
    parts = asdict(EMPTY)
    for name, value in load_yaml(path, "STUDY.yaml").items():
        if name not in parts or type(value) is not type(parts[name]):
            raise ValueError(f"{path} has {name}: {value!r}, but a study has parts as in {EMPTY}")
        parts[name] = value
    study = Study(**parts)
    if not study.recipe.endswith(".py"):
        study.recipe = str(recipes / f"{study.recipe}.py")
    if not Path(study.recipe).is_file():
        raise FileNotFoundError(f"{path}: the recipe {study.recipe} does not exist")
    return study


# The runs


def plan(study: Study, variant: str, tuned: dict, seed: int, budget: float) -> Trial:
    """Returns a run of a variant, with as many updates as its budget allows, at least one. `tuned`
    are the settings that tuning varies or has chosen.

    Raises `ValueError` with the run's name for settings that the recipe refuses, and for settings
    that make runs incomparable.
    """
    label = f"{variant}-seed{seed}"
    own = study.variants[variant]
    settings = study.settings | own | tuned
    wrong = own.keys() & tuned | settings.keys() & OWN
    if wrong:
        raise ValueError(f"{label}: the study itself sets {', '.join(wrong)}: leave it out")
    settings["seed"] = seed
    share = settings.pop("warmup_share", None)  # of the updates, in place of warmup_steps
    trial = read_trial(Path(study.recipe), label, settings)
    config = trial.config
    if not config.eval_every or config.max_hours or config.patience:
        raise ValueError(
            f"{label}: set eval_every above 0, and neither max_hours nor patience, so that a run "
            "has a val/loss after its whole budget"
        )
    updates = config.max_steps
    if budget:
        each = trial.flops_per_token if study.unit == "flops" else 1
        updates = max(1, round(budget / each / config.total_batch_size))
    if share is not None:
        if "warmup_steps" in settings or not 0 <= float(share) <= 1:
            raise ValueError(
                f"{label}: warmup_share is {share!r}: give 0 to 1, and no warmup_steps"
            )
        settings["warmup_steps"] = round(float(share) * updates)
    # Again, since a recipe may choose settings by the length of a run.
    return read_trial(trial.recipe, label, settings | {"max_steps": updates})


def seed_trials(
    study: Study, tuned: dict[str, dict], budget: float, seeds: range | list[int]
) -> list[Trial]:
    """Returns the runs of a budget, seed by seed. `tuned` has the tuned settings of variants."""
    points = product(seeds, study.variants)
    return [plan(study, name, tuned.get(name, {}), seed, budget) for seed, name in points]


def tuning_trials(study: Study) -> list[Trial]:
    """Returns the runs that tune, with the largest budget: those of each combination in turn."""
    trials = []
    for settings in study.grid if study.tune else ():
        tuned = dict.fromkeys(study.variants, settings)
        trials += seed_trials(study, tuned, study.budgets[-1], [0])
    return trials


def compare(study: Study, runs: Runs) -> str:
    """Trains the runs of a study and returns the outcome as Markdown: a table for each budget, and
    remarks. Raises `ValueError` for settings that the recipe refuses, and `OSError` if the folder
    cannot be written."""
    parts = []
    tuned: dict[str, dict] = {}
    losses = runs.train(tuning_trials(study), study.metric)
    if study.tune:
        by_variant = np.nan_to_num(losses, nan=np.inf).reshape(-1, len(study.variants)).T
        for name, own in zip(study.variants, by_variant, strict=True):
            tuned[name] = study.grid[own.argmin()]
            parts.append(f"{name}: {len(study.grid)} trials chose {tuned[name]}")
    heads = ("variant", "verdict", "difference from the baseline", study.metric, "runs")
    for budget in study.budgets:
        trials = seed_trials(study, tuned, budget, range(1, study.seeds + 1))
        values = runs.train(trials, study.metric).reshape(study.seeds, -1)
        variants = zip(study.variants, values.T, strict=True)
        rows = {name: outcome(own, values[:, 0]) for name, own in variants}
        rows[next(iter(rows))][:2] = ["baseline", ""]
        title = f"{study.unit}: {budget:,.0f}" if budget else "Verdict"
        parts += [f"{title} (± is a 95% interval)", markdown(heads, rows)] + runs.caveats(trials)
    return "\n\n".join(parts)


# The outcome


def outcome(own: np.ndarray, base: np.ndarray) -> list[str]:
    """Returns the verdict on a variant, its difference from the baseline, and its metric.

    `own` and `base` have the metric of each seed, (seeds,): NaN for a run that failed, infinite for
    a run that diverged. `judge` gives the verdict on the pairs in which both runs ended without
    diverging. If the numbers of runs that diverged differ, the verdict begins with them.
    """
    both = np.isfinite(own) & np.isfinite(base)
    pairs = own[both] - base[both]
    verdict = judge(pairs)
    diverged, of_base = np.isinf([own, base]).sum(1)
    if diverged != of_base:
        verdict = f"{diverged} diverged, {of_base} of the baseline; {verdict}"
    ended = own[np.isfinite(own)]
    return [verdict, plus_minus(pairs, "+.4f"), plus_minus(ended), str(len(ended))]


def half_width(values: np.ndarray) -> float:
    """Returns half the width of the 95% interval of the mean of `values`, by Student's t."""
    return t.ppf(0.975, len(values) - 1) * sem(values)


def plus_minus(values: np.ndarray, form: str = ".4f") -> str:
    """Formats the mean of values and its interval, such as 3.9260 ± 0.0051: no interval for
    one value, "none" for none."""
    if not len(values):
        return "none"
    text = format(np.mean(values), form)
    if len(values) > 1:
        text += f" ± {half_width(values):{form.lstrip('+')}}"
    return text


def judge(differences: np.ndarray) -> str:
    """Returns the verdict on the differences within pairs of runs of one seed; lower is better.

    It is "better" or "worse" if the 95% interval excludes zero, "equal" if all pairs are equal, or
    "not distinguishable".
    """
    if len(differences) < 2:
        return "not distinguishable: a verdict needs two pairs of runs or more"
    if not np.any(differences):
        return "equal"
    mean = np.mean(differences)
    if abs(mean) <= half_width(differences):
        return "not distinguishable"
    return "better" if mean < 0 else "worse"
