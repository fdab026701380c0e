"""The pages of docs/: each is in the site's contents, what they show and quote is there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from conftest import load_recipe
from launching import ROOT

from gpt2_accel.config import TrainConfig

# `make docs` writes docs/course/.
PAGES = sorted(set((ROOT / "docs").rglob("*.md")) - set((ROOT / "docs/course").glob("*.md")))
# Not the changelog, which names files that were removed.
ROOT_PAGES = sorted(set(ROOT.glob("*.md")) - {ROOT / "CHANGELOG.md"})
SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
ELLIPSIS = re.compile("…+")


def files_of(contents) -> list[str]:
    """The files that the site's contents name, at any depth."""
    if isinstance(contents, str):
        return [contents]
    entries = contents.values() if isinstance(contents, dict) else contents
    return [file for entry in entries for file in files_of(entry)]


def test_the_contents_have_every_page_once():
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES]
    notebooks = [f"course/{path.stem}.md" for path in (ROOT / "course").glob("*.ipynb")]
    assert sorted(files_of(SITE["nav"])) == sorted(pages + ["course/index.md"] + notebooks)


def anchors_of(page: Path) -> set[str]:
    """What a link can add to a page's name: its headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ROOT_PAGES + PAGES, ids=str)
def test_files_and_headings_that_a_page_names_are_there(page):
    text = page.read_text()
    for file, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", text):  # a colon: an address
        # `make docs` writes docs/course/.
        target = page.parent / file.replace("course/index.md", "../course/README.md")
        assert target.exists(), file
        assert not anchor or anchor in anchors_of(target), (file, anchor)
    # In running text too, such as `recipes/cluster/`. NAME stands for any.
    folders = "gpt2_accel|recipes|accelerate_configs|benchmarks|tests|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("page", "defaults"),
    [
        ("training", TrainConfig()),
        ("checkpoints", TrainConfig()),
        ("chat", load_recipe("chat_sft").ChatSFT()),
        ("evaluation", load_recipe("sample").Sample()),
    ],
)
def test_the_documented_defaults_equal_the_code(page, defaults):
    text = (ROOT / f"docs/{page}.md").read_text()
    rows = re.findall(r"^\| `--(\w+)` \| ([^|]*?) ?\| [^|]+ \|$", text, re.MULTILINE)
    assert len(rows) >= 4
    for name, written in rows:
        default = getattr(defaults, name)
        if isinstance(default, bool):
            assert written == ("on" if default else "off"), name
        elif isinstance(default, int | float):
            assert float(written.replace(",", "")) == default, name
        elif isinstance(default, str):
            assert written == f"`{default}`", name


def texts_of(source: str) -> set[str]:
    """The texts in a module, each value that is put into one as `…`."""
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            texts.add(ELLIPSIS.sub("…", "".join(parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return texts


def test_the_errors_on_the_troubleshooting_page_exist_in_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    there = set()
    for folder in ("gpt2_accel", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            there |= texts_of(path.read_text())
    assert len(quoted) == 10
    assert [message for message in quoted if message not in there] == []
