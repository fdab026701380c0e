"""docs/architecture.md names the package's files correctly."""

import re

from launching import ROOT

TEXT = (ROOT / "docs/architecture.md").read_text()
PLACES = re.findall(r"^\| (?:`([\w/.]+)`|leaves) \| (.+) \|$", TEXT, re.MULTILINE)


def test_the_table_of_packages_names_exactly_the_existing_files():
    named = set()
    for package, files in PLACES:
        folder = ROOT / "gpt2_accel" / (package if package.endswith("/") else "")
        listed = re.findall(
            r"`([\w/]+\.py)`", files if package.endswith("/") or not package else f"`{package}`"
        )
        named |= {folder / name for name in listed}
    existing = {path for path in (ROOT / "gpt2_accel").rglob("*.py") if path.stat().st_size}
    faces = {path for path in existing if path.name == "__init__.py"}
    assert named - faces == existing - faces - {ROOT / "gpt2_accel/__main__.py"}
