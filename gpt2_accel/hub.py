"""The Hugging Face Hub: the model card, download, upload, and uploads beside a running training.

A repository's root is a model directory. With the strategy `checkpoint` its folder `last-checkpoint/`
holds what `--resume_from USER/NAME` needs. Tokens are the Hub client's affair (`hf auth login` or
`HF_TOKEN`): none passes through here.
"""

import json
import math
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from gpt2_accel.evals.sources import SOURCES
from gpt2_accel.files import atomic_files

HUB_STRATEGIES = ("end", "every_save", "checkpoint")
LAST_CHECKPOINT = "last-checkpoint"
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "README.md")
OWN_SPLITS = {"train": "training", "val": "held-out"}  # of a run's own data, unnamed on the Hub
PICTURE = "loss.png"  # shown in the card where it lies beside it
ATTEMPTS = 4  # of an upload, beside the client's own
PAUSE = 1.0  # seconds before the second attempt; doubles each time
LONGEST_WAIT = 3600.0  # seconds that the end of a run waits for its last upload


def download(name: str, patterns: tuple[str, ...], folder: str | None = None) -> Path:
    """The local copy of a Hub repository, `USER/NAME` or `USER/NAME@REVISION`, downloaded if need be.

    Only the files at its root that match `patterns`, or those in its `folder`, whose path is returned
    then. Raises `FileNotFoundError` if there is no such repository or it cannot be reached.
    """
    repo_id, _, revision = name.partition("@")
    wanted = [f"{folder}/{pattern}" for pattern in patterns] if folder else list(patterns)
    try:
        path = snapshot_download(
            repo_id,
            revision=revision or None,
            allow_patterns=wanted,
            ignore_patterns=None if folder else ["*/*"],
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name} is neither a folder nor a model on the Hub that can be reached: check its name "
            f"and the connection ({first_line(error)})"
        ) from error
    return Path(path) / folder if folder else Path(path)


def is_repo_id(name: str) -> bool:
    """Whether `name` looks like `USER/NAME` or `USER/NAME@REVISION`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\S+)?", name) is not None


@dataclass
class Training:
    """What a model card says of how a model was made.

    `settings` of the run; `data`: what the text was; `tokens` seen, `hours` of training, `flops` spent
    in all; `hardware` and precision in words; `results`: metric -> value, such as `val/loss`.
    """

    settings: Mapping[str, object]
    data: str
    tokens: int
    hours: float
    flops: float
    hardware: str
    results: Mapping[str, float]


def model_card(name: str, description: str, training: Training | None = None) -> str:
    """The `README.md` of a model directory: metadata that the Hub reads, then text and code.

    `name` is the repository's id, or the folder until there is one; `description` the model in words.
    """
    settings = training.settings if training else {}
    init_from = str(settings.get("init_from") or "")
    on_the_hub = init_from and not Path(init_from).exists()
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "gpt2_accel"],
        license=settings.get("license"),
        base_model=init_from.partition("@")[0] if on_the_hub else None,
        model_name=name.rpartition("/")[2],
        eval_results=eval_results(training.results, training.data) if training else None,
    )
    card = f"""---
{metadata.to_yaml()}
---

# {name.rpartition("/")[2]}

{description}

```python
from transformers import pipeline

name = {json.dumps(name)}
print(pipeline("text-generation", model=name)("Hi")[0]["generated_text"])
```
"""
    return card + (training_section(training) if training else "")


def eval_results(results: Mapping[str, float], data: str | None) -> list[EvalResult] | None:
    """Results by `TASK/METRIC` in the Hub's own form, standard errors left out; None if there are none.

    `data` says what the run's own data was, of which train and val are splits.
    """
    found = []
    for name, value in results.items():
        task, _, metric = name.partition("/")
        if metric.endswith("_stderr") or not math.isfinite(value):
            continue
        source = SOURCES.get(task)
        benchmark = task.removeprefix("lm_eval:")
        named = {"train": data or "training data", "val": f"held out of {data or 'its data'}"}
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=source.repo_id if source else OWN_SPLITS.get(task, benchmark),
                dataset_name=named.get(task, benchmark),
                dataset_config=source and source.config,
                dataset_split=source and source.split,
                metric_type=metric,
                metric_name=name,
                metric_value=round(value, 6),
            )
        )
    return found or None


def add_results(directory: Path, results: Mapping[str, float], description: str) -> None:
    """Puts results into the metadata of a model directory's card, in place of those of the same name.

    A directory without a card gets one; `description` is the model in words.
    """
    path = directory / "README.md"
    text = (
        path.read_text(encoding="utf-8")
        if path.exists()
        else model_card(str(directory), description)
    )
    card = ModelCard(text, ignore_metadata_errors=True)
    new = eval_results(results, None) or []
    names = {result.metric_name for result in new}
    old = [found for found in card.data.eval_results or [] if found.metric_name not in names]
    card.data.eval_results = [*old, *new]
    card.data.model_name = card.data.model_name or directory.resolve().name
    with atomic_files(directory) as folder:
        (folder / path.name).write_text(str(card), encoding="utf-8")


def training_section(training: Training) -> str:
    """The part of the card that says how the model was trained."""
    packages = ("gpt2_accel", "torch", "transformers", "accelerate")
    versions = ", ".join(f"{package} {installed_version(package)}" for package in packages)
    results = "".join(f"| {name} | {value:.4f} |\n" for name, value in training.results.items())
    table = f"\n## Results\n\n| metric | value |\n|---|---|\n{results}" if results else ""
    return f"""
## Training

- Data: {training.data}
- Tokens seen: {training.tokens:,}
- Compute: {training.flops:.3g} FLOPs in {training.hours:.3g} hours on {training.hardware}
- Versions: Python {platform.python_version()}, {versions}
{table}
## Settings

```yaml
{yaml.safe_dump(dict(training.settings), sort_keys=False).strip()}
```
"""


def installed_version(package: str) -> str:
    """The version of an installed package, in words where it runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(from source)"


def push(
    folder: str | Path, repo_id: str, *, private: bool = True, message: str = "Upload the model"
) -> str:
    """Uploads a folder as one commit to `repo_id`, which is made if it is not there; returns its URL.

    Weights and checkpoint files of an earlier upload that this one has not are removed in the same
    commit; the client sends only files that changed. Raises what the Hub client raises.
    """
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=message,
        delete_patterns=["model*.safetensors*", f"{LAST_CHECKPOINT}/*"],
    )
    return str(commit.repo_url)


def stage(source: Path, target: Path, repo_id: str) -> None:
    """Lays out in `target` the model files of the directory `source` for an upload to `repo_id`.

    Hard links where the disk has them, so that it takes no time or space and that the upload does not
    mind if `source` is removed. The card then names `repo_id` and shows the picture of the loss.
    """
    target.mkdir(parents=True)
    for pattern in (*MODEL_FILES, PICTURE):
        for path in source.glob(pattern):
            link(path, target / path.name)
    card = target / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        card.unlink()  # the link, not the file
        named = re.sub(r'^name = ".*"$', f"name = {json.dumps(repo_id)}", text, flags=re.MULTILINE)
        if (target / PICTURE).exists():
            named = named.replace("\n## Training\n", f"\n## Training\n\n![Loss]({PICTURE})\n", 1)
        card.write_text(named, encoding="utf-8")


def link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def push_model(directory: Path, repo_id: str, *, private: bool = True, card: str) -> str:
    """Uploads a model directory, with `card` if it has none of its own; returns the repository's URL.

    Raises `OSError`, in one sentence, if the upload fails.
    """
    check_repo_id(repo_id)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "upload"
        stage(directory, folder, repo_id)
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(card, encoding="utf-8")
        try:
            return push_patiently(folder, repo_id, private=private, message="Upload the model")
        except Exception as error:
            raise OSError(f"could not push to {repo_id}: {reason(error)}") from error


def push_patiently(folder: Path, repo_id: str, **options) -> str:
    """`push`, tried again where that can help."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return push(folder, repo_id, **options)
        except Exception as error:  # of the client, its HTTP library or the network
            if is_final(error) or attempt == ATTEMPTS:
                raise
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError("not reached")


def is_final(error: Exception) -> bool:
    """Whether trying again is no use: the server understood, and refused."""
    response = getattr(error, "response", None)
    if isinstance(error, HfHubHTTPError) and response is not None:
        return 400 <= response.status_code < 500 and response.status_code not in (408, 409, 429)
    return isinstance(error, ValueError)


def reason(error: Exception) -> str:
    """Why an upload failed, and what to do, in one sentence."""
    response = getattr(error, "response", None)
    mend = "it can be pushed later with recipes/push_to_hub.py"
    if getattr(response, "status_code", None) in (401, 403):
        mend = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
    return f"{first_line(error)}: {mend}"


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def check_repo_id(repo_id: str) -> None:
    """Raises `ValueError` if `repo_id` cannot be the name of a repository."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(
            f"{repo_id!r} is not a name for a Hub repository: give USER/NAME ({first_line(error)})"
        ) from error


class Uploads:
    """Pushes the checkpoints of a run in the background; a context manager around its loop.

    Strategies, as in HF's Trainer: `end` pushes the final model only; `every_save` also the model of
    each checkpoint; `checkpoint` that and, in `last-checkpoint/`, what a resume needs. A checkpoint is
    held by hard links until it is sent. While one upload runs, only the newest checkpoint waits. What
    fails is tried again, then reported through `say`; nothing here ends the run.

    With `repo_id` None it does nothing. Raises `ValueError` for a `repo_id` that cannot be one.
    """

    def __init__(
        self,
        repo_id: str | None,
        run_dir: str | Path,
        say: Callable[[str], None],
        *,
        strategy: str = "every_save",
        private: bool = True,
    ):
        if repo_id is not None:
            check_repo_id(repo_id)
        self.repo_id, self.run_dir, self.say = repo_id, Path(run_dir), say
        self.strategy, self.private = strategy, private
        self.scratch = self.run_dir / ".uploads"
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._worker: threading.Thread | None = None

    def __enter__(self) -> "Uploads":
        if self.repo_id is not None:
            disable_progress_bars()  # they would tear the run's own
            shutil.rmtree(self.scratch, ignore_errors=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        worker = self._worker
        if kind is None and worker is not None:
            self.say(f"waiting for the upload to {self.repo_id}; the model is in {self.run_dir}")
            worker.join(LONGEST_WAIT)
            if worker.is_alive():
                self.say(f"the upload to {self.repo_id} does not end: left alone")
        if self.repo_id is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def push(self, directory: Path, checkpoint: Path, *, final: bool = False) -> None:
        """Pushes the model in `directory` and, if the strategy says so, `checkpoint` for a resume.

        Returns at once. `final` marks the last model of the run.
        """
        if self.repo_id is None or (self.strategy == "end" and not final):
            return
        folder = self.scratch / f"{time.time_ns()}"
        try:
            stage(directory, folder, self.repo_id)
            if self.strategy == "checkpoint":
                shutil.copytree(checkpoint, folder / LAST_CHECKPOINT, copy_function=link)
        except OSError as error:  # a full disk must not end the run
            self.say(f"no upload to {self.repo_id}: {first_line(error)}")
            return
        with self._lock:
            overtaken, self._waiting = self._waiting, folder
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, daemon=True)
                self._worker.start()
        if overtaken is not None:
            shutil.rmtree(overtaken, ignore_errors=True)

    def _work(self) -> None:
        while True:
            with self._lock:
                folder, self._waiting = self._waiting, None
                if folder is None:
                    self._worker = None
                    return
            try:
                url = push_patiently(folder, self.repo_id, private=self.private)
                self.say(f"uploaded to {url}")
            except Exception as error:
                self.say(f"could not upload to {self.repo_id}: {reason(error)}")
            shutil.rmtree(folder, ignore_errors=True)
