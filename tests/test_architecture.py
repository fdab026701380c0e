"""docs/architecture.md names the package's files correctly."""

import re

from launching import ROOT

PACKAGE = ROOT / "gpt2_accel"
TEXT = (ROOT / "docs/architecture.md").read_text()


def test_the_list_of_packages_names_exactly_the_existing_files():
    text = TEXT[: TEXT.index("## A training run")]
    named = set()
    folder = PACKAGE
    for line in text.splitlines():
        if line.startswith("**"):
            heading = re.match(r"\*\*`(\w+/)`", line)
            folder = PACKAGE / heading[1] if heading else PACKAGE
        if line.startswith(("- ", "**`config.py`")):
            named |= {folder / name for name in re.findall(r"`([\w/]+\.py)`", line)}
    existing = {path for path in PACKAGE.rglob("*.py") if path.stat().st_size}
    faces = {path for path in existing if path.name == "__init__.py"}
    assert named - faces == existing - faces - {PACKAGE / "__main__.py"}
