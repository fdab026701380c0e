"""The model card: a model directory's `README.md`, with the metadata that the Hub reads."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

PACKAGES = ("gpt2_accel", "torch", "transformers", "accelerate")  # the card records their versions
# A Jinja template for `ModelCard`.
TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

{{ description }}
{% if custom %}
`transformers` cannot open this model: {{ custom }}.

```sh
gpt2-accel sample --model {{ name }} --model_class FILE.py:CLASS
```
{% elif adapter %}
An adapter of peft; these lines open it on its base model:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

name = {{ name | tojson }}
{{ adapter }}
```
{% else %}
```python
from transformers import pipeline

name = {{ name | tojson }}
{% if chat -%}
print(pipeline("text-generation", model=name)([{"role": "user", "content": "Hi"}])\
[0]["generated_text"][-1])
{%- else -%}
print(pipeline("text-generation", model=name)("Hi")[0]["generated_text"])
{%- endif %}
```

`transformers serve` and `vllm serve` answer at {% if chat -%}
`/v1/chat/completions`, with the chat template of this directory
{%- else -%}
`/v1/completions`; there is no chat template
{%- endif %}. For Ollama and
llama.cpp, `convert_hf_to_gguf.py` of llama.cpp writes a GGUF file.
{% endif %}
{%- if training %}
## Training

{% if training.weights %}- Weights: {{ training.weights }}
{% endif %}- Data: {{ data }}
- Tokens seen: {{ "{:,}".format(training.tokens) }}
- Compute: {{ "{:.3g}".format(training.flops) }} FLOPs in {{
    "{:.3g}".format(training.hours) }} hours on {{ training.hardware }}
- Versions: {{ versions }}
{% if training.results and not training.weights %}
## Results

± and ranges are 95% intervals.

| metric | value |
|---|---|
{% for metric, value in training.results.items() -%}
| {{ metric }} | {{ value }} |
{% endfor %}
{%- endif %}{% if training.remarks and not training.weights %}
## Remarks

```
{{ training.remarks }}```
{% endif %}
## Settings

```yaml
{{ settings }}```
{% endif %}"""


@dataclass
class Training:
    """The training section of a model card.

    `settings` of the run; `data`, a description of the text; `tokens` seen, `hours` of training,
    total `flops`; `hardware` and precision in words; `results`, metric -> value with its interval,
    such as `val/loss`; `remarks`, text; `weights`, which ones they are if not the last, which
    `results` and `remarks` describe.
    """

    settings: Mapping[str, object]
    data: str
    tokens: int
    hours: float
    flops: float
    hardware: str
    results: Mapping[str, str]
    remarks: str = ""
    weights: str = ""


def model_card(
    name: str,
    description: str,
    training: Training | None,
    model_type: str,
    *,
    chat: bool,
    custom: str,
    adapter: str,
) -> str:
    """Returns the `README.md` of a model directory: metadata for the Hub, text, a code example.

    `name` is the repository id, or the folder's name; `description` is the model in words,
    `model_type` its type in `config.json`. `chat`: its tokenizer has a chat template. `custom` is
    the reason why `transformers` cannot open it, `adapter` the code that opens an adapter. Absolute
    paths in the training data and the settings are shortened to their last part.
    """
    from huggingface_hub import ModelCard, ModelCardData

    settings = training.settings if training else {}
    base = str(settings.get("init_from") or "")
    on_the_hub = base and not (Path(base).is_absolute() or Path(base).exists())
    tags = [model_type, "gpt2_accel"]
    if chat:
        tags.append("chat")
    metadata = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        base_model=base.partition("@")[0] if on_the_hub else None,
    )
    card = ModelCard.from_template(
        metadata,
        template_str=TEMPLATE,
        title=name.rpartition("/")[2],
        name=name,
        description=description,
        chat=chat,
        custom=custom,
        adapter=adapter,
        training=training,
        data=without_folders(training.data) if training else None,
        settings=without_folders(yaml.safe_dump(dict(settings), sort_keys=False)),
        versions=", ".join(f"{name} {found}" for name, found in installed_versions().items()),
    )
    return str(card)


def named_card(text: str, repo_id: str) -> str:
    """Replaces the folder's name in the code of a card by the name `repo_id`."""
    return re.sub('^name = ".*"$', f'name = "{repo_id}"', text, count=1, flags=re.MULTILINE)


def without_folders(text: str) -> str:
    """Shortens the absolute paths in a text to their last part."""
    return re.sub(r"(?<![^\s'\"])/\S+", lambda path: Path(path[0]).name or "/", text)


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and `PACKAGES`; `(from source)` if one is not installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "(from source)"
    return versions
