"""The model card: a model directory's `README.md`, with the metadata that the Hub reads."""

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

PACKAGES = ("gpt2_accel", "torch", "transformers", "accelerate")  # whose versions are recorded
# A Jinja template for `ModelCard`.
TEMPLATE = """\
---
{{ card_data }}
---

# {{ model_name }}

{{ description }}

```python
from transformers import pipeline

name = {{ name | tojson }}
{% if chat -%}
print(pipeline("text-generation", model=name)([{"role": "user", "content": "Hi"}])[0]["generated_text"][-1])
{%- else -%}
print(pipeline("text-generation", model=name)("Hi")[0]["generated_text"])
{%- endif %}
```

`transformers serve` and `vllm serve` answer at {% if chat -%}
`/v1/chat/completions`, with the chat template of this directory
{%- else -%}
`/v1/completions`; there is no chat template
{%- endif %}. For llama.cpp and Ollama
`gpt2-accel export` writes a GGUF file.
{% if training %}
## Training

- Data: {{ data }}
- Tokens seen: {{ "{:,}".format(training.tokens) }}
- Compute: {{ "{:.3g}".format(training.flops) }} FLOPs in {{ "{:.3g}".format(training.hours) }} hours on {{ training.hardware }}
- Versions: {{ versions }}
{% if training.results %}
## Results

| metric | value |
|---|---|
{% for metric, value in training.results.items() -%}
| {{ metric }} | {{ "%.4f" | format(value) }} |
{% endfor %}
{%- endif %}
## Settings

```yaml
{{ settings }}```
{% endif %}"""


@dataclass
class Training:
    """The training section of a model card.

    `settings` of the run; `data`, a description of the text; `tokens` seen, `hours` of training, total `flops`;
    `hardware` and precision in words; `results`, metric -> value, such as `val/loss`.
    """

    settings: Mapping[str, object]
    data: str
    tokens: int
    hours: float
    flops: float
    hardware: str
    results: Mapping[str, float]


def model_card(
    name: str,
    description: str,
    training: Training | None = None,
    model_type: str = "gpt2",
    *,
    chat: bool = False,
) -> str:
    """Returns the `README.md` of a model directory: the Hub's metadata, then text and a code example.

    `name` is the repository id, or the folder's name; `description` is the model in words, `model_type` that of its
    config. With `chat` its tokenizer has a chat template. Absolute paths in the training data and the settings are shortened
    to their last part.
    """
    from huggingface_hub import ModelCard, ModelCardData

    settings = training.settings if training else {}
    base = str(settings.get("init_from") or "")
    on_the_hub = base and not (Path(base).is_absolute() or Path(base).exists())
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[model_type, "gpt2_accel", *(["chat"] if chat else [])],
        base_model=base.partition("@")[0] if on_the_hub else None,
        model_name=name.rpartition("/")[2],
        eval_results=eval_results(training.results) if training else None,
    )
    card = ModelCard.from_template(
        metadata,
        template_str=TEMPLATE,
        name=name,
        description=description,
        chat=chat,
        training=training,
        data=without_folders(training.data) if training else None,
        settings=without_folders(yaml.safe_dump(dict(settings), sort_keys=False)),
        versions=", ".join(f"{name} {found}" for name, found in installed_versions().items()),
    )
    return str(card)


def named_card(text: str, repo_id: str) -> str:
    """Replaces the folder's name in the card's title, metadata and code by the repository's."""
    from huggingface_hub import ModelCard

    card = ModelCard(text, ignore_metadata_errors=True)
    folder, name = card.data.model_name, repo_id.rpartition("/")[2]
    if folder is None:  # not a card of this package
        return text
    card.data.model_name = name
    text = str(card).replace(f"\n# {folder}\n", f"\n# {name}\n", 1)
    return re.sub(r'^name = ".*"$', f'name = "{repo_id}"', text, count=1, flags=re.MULTILINE)


def without_folders(text: str) -> str:
    """Shortens the absolute paths in a text to their last part."""
    return re.sub(r"(?<![^\s'\"])/\S+", lambda path: Path(path[0]).name or "/", text)


def eval_results(results: Mapping[str, float]) -> "list[EvalResult] | None":
    """Converts results by `TASK/METRIC` to the Hub's metadata, without standard errors; None if there are none."""
    from huggingface_hub import EvalResult

    found = []
    for name, value in results.items():
        task, _, metric = name.partition("/")
        if metric.endswith("_stderr") or not math.isfinite(value):
            continue
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=task,
                dataset_name=task,
                metric_type=metric,
                metric_name=name,
                metric_value=round(value, 6),
            )
        )
    return found or None


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and `PACKAGES`, `(from source)` of what is not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "(from source)"
    return found
