"""Tables of cases, as YAML files beside their tests."""

from pathlib import Path

import yaml


def table(name: str):
    """Returns the content of tests/NAME.yaml."""
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
