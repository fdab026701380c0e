"""docs/architecture.md names the package's files correctly."""

import re

from launching import ROOT


def test_the_list_of_packages_names_exactly_the_existing_files():
    listed = (ROOT / "docs/architecture.md").read_text().partition("## A training run")[0]
    named = {path.rpartition("/")[2] for path in re.findall(r"`([\w/]+\.py)`", listed)}
    paths = (ROOT / "gpt2_accel").rglob("*.py")
    existing = {path.name for path in paths if path.stat().st_size}
    assert named - {"__init__.py", "test_imports.py"} == existing - {"__init__.py", "__main__.py"}
