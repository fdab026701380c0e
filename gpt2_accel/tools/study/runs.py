"""Trains the runs of a study, one after the other, and records them in its table `runs.csv`.

Each run is a subprocess, `python RECIPE --SETTING VALUE …`, with a folder in `runs/` and a lock.
Several drivers, also on several machines, may share the folder of a study: a driver trains the runs
whose lock it gets.
"""

import csv
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from filelock import FileLock, Timeout

import gpt2_accel.train
from gpt2_accel.checkpoint.find import model_directory, read_status
from gpt2_accel.config import INERT, TrainConfig
from gpt2_accel.data.documents import text_digest
from gpt2_accel.data.shards import read_manifest, read_parts
from gpt2_accel.data.source import data_fingerprint
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.estimate.memory import model_shape
from gpt2_accel.hf.convert import local_directory
from gpt2_accel.hf.safetensors_files import weights_digest
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.files import LOCK, digest, read_json_lines, remove, write_file
from gpt2_accel.runtime.signals import DRIVER

# Launch options that affect results, as variables that `accelerate launch` sets; runs inherit them.
LAUNCH = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}


# A run


@dataclass
class Trial:
    """A run of a study.

    `label` names its folder; `changes` are the settings of its command line; `config` has all
    settings that the recipe passes to `train`; `shape` is that of the model, `data` the fingerprint
    of the data.
    """

    recipe: Path
    label: str
    changes: dict[str, Any]
    config: TrainConfig
    shape: ModelConfig
    data: str

    def __str__(self) -> str:
        return (
            f"{self.label}: {self.tokens:,} tokens, {self.tokens * self.flops_per_token:.3g} FLOPs"
        )

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward per token."""
        return flops_per_token(self.shape, self.config.tokens_per_sequence)

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.config.max_steps * self.config.total_batch_size

    @cached_property
    def id(self) -> str:
        """12 hexadecimal digits of a SHA-256 of the recipe's name, the settings that affect results
        and differ from the defaults, the data, the weights of `init_from`, and `LAUNCH`."""
        default = TrainConfig().settings().items()
        own: dict[str, Any] = {"recipe": self.recipe.name}
        for name, value in self.config.settings().items():
            if (name, value) not in default and name not in INERT and name != "init_from":
                own[name] = value
        if self.config.init_from:
            own["weights"] = weights_digest(local_directory(model_directory(self.config.init_from)))
        launch = {kind: os.environ.get(name, "no").lower() for kind, name in LAUNCH.items()}
        return text_digest(json.dumps([own, self.data, launch], sort_keys=True))[:12]


def code_of(recipe: Path) -> str:
    """Returns 12 digits of a SHA-256 of a recipe's file and this package's modules."""
    package = Path(gpt2_accel.__file__).parent.rglob("*.py")
    return text_digest(digest(recipe) + "".join(map(digest, sorted(package))))[:12]


def arguments(changes: dict[str, Any], output_dir: str) -> list[str]:
    """Returns the words of a recipe's command line."""
    words = ["--output_dir", output_dir, "--resume_from", "latest"]
    for name, value in changes.items():
        words.append(f"--{name}")
        words += map(str, value if isinstance(value, list) else [value])
    return words


def read_trial(recipe: Path, label: str, changes: dict[str, Any]) -> Trial:
    """Returns the run of a recipe with changed settings.

    The recipe runs up to its call of `train`, so it may prepare its data. Raises `ValueError` with
    the label for settings that the recipe refuses.
    """
    words = [str(recipe)] + arguments(changes, "runs/.settings")  # a folder that is never created
    outcome: Any = None
    with (
        patch.object(gpt2_accel.train, "train", capture),
        patch.object(sys, "argv", words),
        patch.object(sys, "path", [str(recipe.parent)] + sys.path),
        redirect_stdout(io.StringIO()),
    ):
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except SystemExit as end:
            outcome = end.code
    if not isinstance(outcome, tuple):
        reason = outcome or "the recipe does not call train: run it alone to see why"
        raise ValueError(f"{label}: {reason}")
    typed = {name: getattr(outcome[0], name, value) for name, value in changes.items()}
    return Trial(recipe, label, typed, *outcome)


def capture(config: TrainConfig, **_: Any) -> None:
    """Replaces `train`: ends the recipe with its settings, its model's shape and its data.

    Raises `ValueError` if the shape is impossible.
    """
    manifest = read_manifest(config.data_dir)
    shape = model_shape(config, manifest["tokenizer"]["vocab_size"])
    parts = read_parts(Path(config.data_dir), manifest)
    sys.exit((config, shape, data_fingerprint(manifest, parts)))  # type: ignore[arg-type]


# The runs of a study


class Runs:
    """The runs of a study in `folder`, and its table `runs.csv`. A run in this table is done, and
    its weights and checkpoints are removed.

    `rows` has the runs by id: the rows of the table, and a loss of NaN for those that failed here.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.table = folder / "runs.csv"
        self.rows = read_table(self.table)

    def train(self, trials: list[Trial], metric: str = "loss") -> np.ndarray:
        """Trains the trials that are not recorded, or waits until other drivers have trained them.
        Returns the `loss` or `bits_per_byte` of each: infinite if it diverged, NaN if it failed or
        does not have this metric.

        Reports a run that fails and continues with the others. Raises `OSError` if the folder
        cannot be written.
        """
        while left := [trial for trial in trials if trial.id not in self.rows]:
            for trial in left:
                with suppress(Timeout), FileLock(self.folder / f"runs/.{trial.id}.lock", 0):
                    self.rows |= read_table(self.table)
                    if trial.id not in self.rows:
                        self._finish(trial)
            time.sleep(0.5)  # other drivers hold the locks of the rest
        values = []
        for trial in trials:
            row = self.rows[trial.id]
            loss = float(row["loss"])
            values.append(float(row[metric] or "nan") if math.isfinite(loss) else loss)
        return np.array(values)

    def _finish(self, trial: Trial) -> None:
        """Trains a locked trial, unless its folder already has the result, and records it. A run
        that other code has begun starts from scratch in another folder."""
        code = code_of(trial.recipe)
        name = re.sub(r"[^\w.+=-]+", "_", trial.label)
        folder = self.folder / f"runs/{name}-{trial.id}-{code}"
        if result_row(trial, folder) is None:
            train_run(trial, folder)
        row = result_row(trial, folder)
        if row is None:
            self.rows[trial.id] = {"loss": math.nan, "code": code}
            return
        row["code"] = code
        with FileLock(self.folder / "runs/.table.lock"):
            rows = read_table(self.table) | {trial.id: row}
            text = io.StringIO()
            writer = csv.DictWriter(text, row, lineterminator="\n")
            writer.writeheader()
            # The same runs give the same file.
            writer.writerows(sorted(rows.values(), key=itemgetter("settings", "id")))
            write_file(self.table, text.getvalue())
        self.rows |= rows
        for path in folder.iterdir():
            if re.fullmatch(r"latest|best|checkpoint-.*|.*\.safetensors", path.name):
                remove(path)

    def caveats(self, trials: list[Trial]) -> list[str]:
        """Returns a remark if other code recorded some of the trials."""
        codes = {self.rows[trial.id].get("code") for trial in trials}
        if codes == {code_of(trials[0].recipe)}:
            return []
        return ["some runs were recorded by another version of the recipe or of gpt2_accel"]


def train_run(trial: Trial, folder: Path) -> None:
    """Starts or resumes a trial in `folder`, waits for its end and reports its exit code.

    When this process ends, the run saves a checkpoint and stops. Raises `Timeout` if the process of
    a dead driver still trains it.
    """
    folder.mkdir(exist_ok=True)
    with FileLock(folder / LOCK, 0):
        print(f"\n{trial}", file=sys.stderr)
    process = subprocess.Popen(
        [sys.executable, str(trial.recipe)] + arguments(trial.changes, str(folder)),
        env=os.environ | {DRIVER: str(os.getpid())},
        start_new_session=True,  # Ctrl-C reaches only this process, which stops its run
    )
    try:
        print(f"exit code {process.wait()}: {folder}", file=sys.stderr)
    finally:
        process.terminate()
        process.wait()


def result_row(trial: Trial, folder: Path) -> dict | None:
    """Returns the row of the run in `folder`; None if it neither finished nor diverged.

    `loss` is the val/loss after the last update in nats per token, infinite if the run diverged. A
    row has no times, so a run that was killed and continued has the same row.
    """
    status = read_status(folder)
    lines = read_json_lines(folder / "metrics.jsonl")
    line = lines[-1] if lines else {}
    if str(status.get("reason")).startswith("Diverged"):
        line |= {"val/loss": math.inf, "val/bits_per_byte": None}
    elif status.get("state") != "finished" or "val/loss" not in line:
        return None
    tokens = line.get("tokens", 0)
    return {
        "id": trial.id,
        "settings": json.dumps(trial.changes, sort_keys=True),
        "parameters": trial.shape.parameter_count,
        "updates": status["step"],
        "tokens": tokens,
        "flops": float(tokens * trial.flops_per_token),
        "loss": line["val/loss"],
        "bits_per_byte": line.get("val/bits_per_byte"),
    }


def read_table(path: Path) -> dict[str, dict]:
    """Returns the rows of a CSV file by id; empty if the file does not exist."""
    text = path.read_text("utf-8") if path.exists() else ""
    return {row["id"]: row for row in csv.DictReader(text.splitlines())}
