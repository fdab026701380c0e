"""The notebooks of course/ in other forms.

- `pages`: the site's pages, docs/course/*.md, with outputs. `make docs` writes them.
- `address URL`: the repository's address in the first cells, and badges for Colab and Kaggle.
- `handout FOLDER`: the notebooks without solutions and outputs.
"""

import base64
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "course").glob("*.ipynb"))
COLAB = "https://colab.research.google.com"
KAGGLE = "https://kaggle.com"


def linked(text: str) -> str:
    """Returns Markdown of course/ as the site's: links between its pages, badges left out."""
    text = re.sub(r"\[!\[Open in Colab\].*\n\n", "", text)
    return re.sub(r"\]\(([\w.-]+)\.ipynb\)", r"](\1.md)", text).replace("](../docs/", "](../")


def block(text: str, language: str = "text") -> str:
    """Returns a block of code, fenced by more backticks than its text has."""
    fence = max(re.findall("`{3,}", text) + ["```"], key=len) + "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def output_page(output: NotebookNode, image: Path) -> str:
    """Returns an output as Markdown; writes its image."""
    data = output.get("data", {})
    if "image/png" in data:
        image.write_bytes(base64.b64decode(data["image/png"]))
        return f"![What the cell above draws]({image.name})\n"
    if "text/html" in data:
        return f"<div>{data['text/html']}</div>\n"
    return block(re.sub(r"\x1b\[[\d;]*m", "", output.get("text") or data["text/plain"]))


def page(path: Path, folder: Path) -> str:
    """Returns a notebook as Markdown: folded cells folded, without the cell that installs."""
    cells = nbformat.read(path, as_version=4).cells
    setup = next(cell for cell in cells if cell.cell_type == "code")
    parts = [
        cells[0].source,
        f"This page is a notebook: [{path.name}](ADDRESS/blob/main/course/{path.name}).",
    ]
    for number, cell in enumerate(cells[1:]):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell is not setup:
            code = block(cell.source, "python")
            if cell.metadata.get("jupyter", {}).get("source_hidden"):
                title = re.match("# @title (.+)\n", cell.source)
                summary = title[1] if title else "Code"
                code = f'<details markdown="1"><summary>{summary}</summary>\n\n{code}\n</details>\n'
            parts.append(code)
            for count, output in enumerate(cell.outputs):
                parts.append(output_page(output, folder / f"{path.stem}-{number}-{count}.png"))
    return linked("\n\n".join(parts) + "\n")


def write_pages() -> None:
    """Writes the site's pages of the course."""
    folder = ROOT / "docs/course"
    folder.mkdir(exist_ok=True)
    (folder / "index.md").write_text(linked((ROOT / "course/README.md").read_text()))
    for path in NOTEBOOKS:
        (folder / f"{path.stem}.md").write_text(page(path, folder))


def write_address(address: str) -> None:
    """Writes the repository's address into the notebooks, and their badges."""
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        file = f"{address}/blob/main/course/{path.name}"
        github = file.replace("https://github.com", f"{COLAB}/github")
        badges = (
            f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({github}) "
            f"[![Open in Kaggle]({KAGGLE}/static/images/open-in-kaggle.svg)]"
            f"({KAGGLE}/kernels/welcome?src={file})"
        )
        title, *lines = notebook.cells[0].source.split("\n\n")
        kept = [line for line in lines if not line.startswith("[![Open in Colab]")]
        notebook.cells[0].source = "\n\n".join([title, badges, *kept])
        for cell in notebook.cells:
            cell.source = re.sub('(?m)^ADDRESS = ".*?"', f'ADDRESS = "{address}"', cell.source)
        nbformat.write(notebook, path)


def write_handout(folder: Path) -> None:
    """Writes the notebooks without solutions and outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
            if any(tag.startswith("solution") for tag in cell.metadata.get("tags", [])):
                cell.metadata = {}
                cell.source = cell.source.splitlines()[-1].replace(", solution)", ")")
        nbformat.write(notebook, folder / path.name)


if __name__ == "__main__":
    command, *given = sys.argv[1:]
    if command == "pages":
        write_pages()
    elif command == "address":
        write_address(given[0].rstrip("/"))
    elif command == "handout":
        write_handout(Path(given[0]))
