"""The model card: a model directory's `README.md`, with the metadata that the Hub reads."""

import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from gpt2_accel.files import write_file
from gpt2_accel.hf.benchmarks import SOURCES

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

PACKAGES = ("gpt2_accel", "torch", "transformers", "accelerate")  # whose versions are recorded
OWN_SPLITS = {"train": "training", "val": "held-out"}  # of a run's own data, unnamed on the Hub


@dataclass
class Training:
    """The training section of a model card.

    `settings` of the run; `data`, a description of the text; `tokens` seen, `hours` of training, total `flops`;
    `hardware` and precision in words; `results`, metric -> value, such as `val/loss`; `updates`, the update at which
    each result was computed.
    """

    settings: Mapping[str, object]
    data: str
    tokens: int
    hours: float
    flops: float
    hardware: str
    results: Mapping[str, float]
    updates: Mapping[str, int] = field(default_factory=dict)


def model_card(
    name: str,
    description: str,
    training: Training | None = None,
    model_type: str = "gpt2",
    *,
    chat: bool = False,
) -> str:
    """Returns the `README.md` of a model directory: the Hub's metadata, then text and a code example.

    `name` is the repository id, or the folder's name; `description` is the model in words, `model_type` that
    of its config. With `chat` its tokenizer has a chat template. Absolute paths in `training` are shortened to their last part.
    """
    from huggingface_hub import ModelCardData

    settings = training.settings if training else {}
    init_from = str(settings.get("init_from") or "")
    on_the_hub = init_from and not (Path(init_from).is_absolute() or Path(init_from).exists())
    if training:
        settings = {key: without_folders(value) for key, value in settings.items()}
        training = replace(training, settings=settings, data=without_folders(training.data))
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[model_type, "gpt2_accel", *(["chat"] if chat else [])],
        base_model=init_from.partition("@")[0] if on_the_hub else None,
        model_name=name.rpartition("/")[2],
        eval_results=eval_results(training.results, training.data) if training else None,
    )
    call, served = (
        'model=name)("Hi")[0]["generated_text"])',
        "`/v1/completions`; there is no chat template",
    )
    if chat:
        call = """model=name)([{"role": "user", "content": "Hi"}])[0]["generated_text"][-1])"""
        served = "`/v1/chat/completions`, with the chat template of this directory"
    card = f"""---
{metadata.to_yaml()}
---

# {name.rpartition("/")[2]}

{description}

```python
from transformers import pipeline

name = {json.dumps(name)}
print(pipeline("text-generation", {call}
```

`transformers serve` and `vllm serve` answer at {served}. For llama.cpp and Ollama
`gpt2-accel export` writes a GGUF file.
"""
    return card + (training_section(training) if training else "")


def named_card(text: str, repo_id: str) -> str:
    """Replaces the folder's name in the card's title, metadata and code by the repository's."""
    from huggingface_hub import ModelCard

    card = ModelCard(text, ignore_metadata_errors=True)
    folder, name = card.data.model_name, repo_id.rpartition("/")[2]
    if folder:
        card.data.model_name = name
        text = re.sub(
            rf"^# {re.escape(folder)}$", f"# {name}", str(card), count=1, flags=re.MULTILINE
        )
    return re.sub(r'^name = ".*"$', f"name = {json.dumps(repo_id)}", text, flags=re.MULTILINE)


def without_folders(value: object) -> object:
    """Shortens the absolute paths in a text to their last part."""
    if not isinstance(value, str):
        return value
    return re.sub(r"(?<!\S)/\S+", lambda match: Path(match[0].rstrip("/")).name or "/", value)


def eval_results(results: Mapping[str, float], data: str | None) -> "list[EvalResult] | None":
    """Converts results by `TASK/METRIC` to the Hub's metadata, without standard errors; None if there are none.

    `data` describes the run's data; its splits are train and val.
    """
    from huggingface_hub import EvalResult

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
    """Adds results to the metadata of a model directory's card; they replace results of the same name.

    A directory without a card gets one; `description` is the model in words.
    """
    from huggingface_hub import ModelCard

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
    write_file(path, str(card))


def training_section(training: Training) -> str:
    """Returns the training section of the card."""
    versions = ", ".join(f"{name} {found}" for name, found in installed_versions().items())
    results = "".join(
        f"| {name} | {value:.4f} | {training.updates.get(name, '')} |\n"
        for name, value in training.results.items()
    )
    head = "| metric | value | at update |\n|---|---|---|\n"
    table = f"\n## Results\n\n{head}{results}" if results else ""
    return f"""
## Training

- Data: {training.data}
- Tokens seen: {training.tokens:,}
- Compute: {training.flops:.3g} FLOPs in {training.hours:.3g} hours on {training.hardware}
- Versions: {versions}
{table}
## Settings

```yaml
{yaml.safe_dump(dict(training.settings), sort_keys=False).strip()}
```
"""


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and `PACKAGES`."""
    found = {package: installed_version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **found}


def installed_version(package: str) -> str:
    """Returns the version of a package, `(from source)` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(from source)"
