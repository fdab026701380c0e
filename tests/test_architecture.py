"""docs/architecture.md names the package's files correctly, and setup.cfg its packages."""

import configparser
import re

from launching import ROOT

from gpt2_accel.runtime.recipe_command import FOLDERS

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


def test_setup_cfg_names_exactly_the_existing_packages():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    outside = {f"gpt2_accel.{name}" for name in FOLDERS}
    named = set(setup["options"]["packages"].split()) - outside
    faces = (ROOT / "gpt2_accel").rglob("__init__.py")
    assert named == {".".join(path.parent.relative_to(ROOT).parts) for path in faces}
