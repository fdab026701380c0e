"""A run of a study: its settings, resolved by the recipe, and its identity."""

import hashlib
import io
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gpt2_accel.train
from gpt2_accel.checkpoint.find import model_directory
from gpt2_accel.config import INERT, TrainConfig
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.estimate.memory import model_shape
from gpt2_accel.hf.convert import local_directory
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.files import digest

PACKAGE = Path(gpt2_accel.__file__).parent
# Launch options that affect results, as variables that `accelerate launch` sets; runs inherit them.
LAUNCH = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}


@dataclass(frozen=True)
class Trial:
    """A run of a study.

    `label` names its folder; `changes` are the settings of its command line; `resolved` are all
    settings that the recipe passes to `train`; `code` is `code_of` the recipe that resolved them.
    """

    recipe: Path
    label: str
    changes: Mapping[str, Any]
    resolved: Mapping[str, Any]
    code: str = ""

    def changed(self, label: str, **changes: Any) -> "Trial":
        """Returns the trial with another label and changed settings, on which no other setting may
        depend."""
        merged = dict(self.changes) | changes
        return replace(self, label=label, changes=merged, resolved=dict(self.resolved) | changes)

    @cached_property
    def config(self) -> TrainConfig:
        """The settings, without those that only the recipe has."""
        names = TrainConfig.__dataclass_fields__
        return TrainConfig(**{name: v for name, v in self.resolved.items() if name in names})

    @cached_property
    def shape(self) -> ModelConfig:
        """The shape of the model. Raises `ValueError` if it cannot be built."""
        return shape_of(self.config)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward per token."""
        return flops_per_token(self.shape, self.config.tokens_per_sequence)

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.config.max_steps * self.config.total_batch_size

    @property
    def flops(self) -> float:
        """FLOPs of the run."""
        return float(self.tokens * self.flops_per_token)

    @cached_property
    def id(self) -> str:
        """12 hexadecimal digits of a SHA-256 of the recipe's name, the settings that affect results
        and differ from the defaults, the data, the weights of `init_from`, and `LAUNCH`."""
        default = TrainConfig().settings().items()
        own: dict[str, Any] = {"recipe": self.recipe.name}
        for name, value in self.resolved.items():
            if (name, value) not in default and name not in INERT and name != "init_from":
                own[name] = value
        if self.config.init_from:
            folder = local_directory(model_directory(self.config.init_from))
            files = list(folder.glob("*.safetensors"))
            files += folder.glob("*.bin")
            files.append(folder / "config.json")
            own["files"] = sorted((path.name, digest(path)) for path in files)
        launch = {kind: os.environ.get(name, "no").lower() for kind, name in LAUNCH.items()}
        content = [own, data_fingerprint(self.config.data_dir), launch]
        return short_hash(json.dumps(content, sort_keys=True))


def short_hash(text: str) -> str:
    """Returns the first 12 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def shape_of(config: TrainConfig) -> ModelConfig:
    """Returns the model shape of a run on its data. Raises `ValueError` if it is impossible."""
    return model_shape(config, read_manifest(config.data_dir)["tokenizer"]["vocab_size"])


def arguments(changes: Mapping[str, Any], output_dir: Path) -> list[str]:
    """Returns the words of a recipe's command line."""
    words = []
    for name, value in changes.items():
        words.append(f"--{name}")
        values = value if isinstance(value, list) else [value]
        words += map(str, values)
    words += ["--output_dir", str(output_dir), "--resume_from", "latest"]
    return words


def read_trials(recipe: Path, changes: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Trial]:
    """Returns a trial for each label and its changed settings, with all settings that the recipe
    passes to `train`.

    The recipe runs up to its call of `train`, so it may prepare its data. Raises `ValueError` with
    the label for settings that the recipe refuses.
    """
    code = code_of(recipe)
    trials = []
    argv = sys.argv
    train_module = vars(gpt2_accel.train)
    train = train_module["train"]
    train_module["train"] = capture
    sys.path.insert(0, str(recipe.parent))
    try:
        for label, own in changes:
            CAPTURED.clear()
            sys.argv = [str(recipe)]
            sys.argv += arguments(own, Path("runs/.settings"))  # a folder that is never created
            message: object = None
            try:
                with redirect_stdout(io.StringIO()):
                    runpy.run_path(str(recipe), run_name="__main__")
            except SystemExit as end:
                message = end.code
            if not CAPTURED:
                reason = message or "the recipe does not call train: run it alone to see why"
                raise ValueError(f"{label}: {reason}")
            typed = {name: CAPTURED.get(name, value) for name, value in own.items()}
            trials.append(Trial(recipe, label, typed, dict(CAPTURED), code))
    finally:
        sys.argv = argv
        train_module["train"] = train
    return trials


CAPTURED: dict[str, Any] = {}  # settings; global, since modules that a recipe imports stay loaded


def capture(config: TrainConfig, **_: Any) -> None:
    """Replaces `train`, also in modules that a recipe imports: stores the settings in `CAPTURED`
    and ends the recipe. Raises `ValueError` if the model's shape is impossible."""
    shape_of(config)
    CAPTURED.update(config.settings())
    sys.exit()


def code_of(recipe: Path) -> str:
    """Returns the `short_hash` of a recipe's file and this package's modules."""
    content = digest(recipe)
    for path in sorted(PACKAGE.rglob("*.py")):
        content += digest(path)
    return short_hash(content)
