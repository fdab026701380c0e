"""docs/architecture.md names the package's files and functions correctly."""

import re

import pytest
from launching import ROOT

TEXT = (ROOT / "docs/architecture.md").read_text()
QUESTIONS = re.findall(r"^\| (.+\?) \| `([^`]+)` \| `([^`]+)` \|$", TEXT, re.MULTILINE)
PLACES = re.findall(r"^\| (?:`([\w/.]+)`|leaves) \| (.+) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("question, file, name", QUESTIONS)
def test_each_question_names_the_file_that_defines_the_answer(question, file, name):
    assert name in (ROOT / file).read_text()
    if name.startswith("class "):
        pattern = re.compile(rf"^{re.escape(name)}\b", re.MULTILINE)
        sources = (ROOT / "gpt2_accel").rglob("*.py")
        assert [p for p in sources if pattern.search(p.read_text())] == [ROOT / file]


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
    names = ("__main__.py", "model.py", "generate.py")
    others = {ROOT / "gpt2_accel" / name for name in names}
    assert named - faces == existing - faces - others


def test_former_names_are_importable():
    import gpt2_accel.generate
    import gpt2_accel.model
    from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
    from gpt2_accel.config import TrainConfig, parse_config, required, setting
    from gpt2_accel.data.prepare import prepare
    from gpt2_accel.train import accumulate_gradients, train

    assert gpt2_accel.model.GPT is GPT and gpt2_accel.model.GPTConfig is GPTConfig
    names = "Completion DTYPES Sampling complete encode_prompt load stream tokens"
    assert all(hasattr(gpt2_accel.generate, name) for name in names.split())
    found = (from_pretrained, save_pretrained, TrainConfig, parse_config, required, setting)
    assert all(map(callable, (*found, prepare, accumulate_gradients, train)))
