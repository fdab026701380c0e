"""Where the items of a benchmark come from: the Hugging Face Hub, or a local file.

From the Hub each is read as the Parquet file that the Hub itself makes of a data set, so that no data
set's own script is run (`datasets` runs none any more).
"""

import re
from pathlib import Path
from types import UnionType

from huggingface_hub import hf_hub_download

from gpt2_accel.errors import first_line
from gpt2_accel.files import parse_json
from gpt2_accel.hf.benchmarks import SOURCES, Source

PARQUET_REVISION = "refs/convert/parquet"  # of every data set, made by the Hub


def read_items(task: str, data: str | Path | None = None) -> list[dict]:
    """The items of `task`: from the Hub, where `SOURCES` has it, or from the local file `data`.

    A `.jsonl` file has an object a line; of any other file the text is the one item, `{"text": …}`, and for
    LAMBADA each line. Raises `FileNotFoundError` if there is no such file, or no Hub, `ValueError` if it holds
    no items, is not UTF-8 or a line is not a JSON object.
    """
    if data is None:
        items = from_hub(SOURCES[task])
    elif not Path(data).is_file():
        raise FileNotFoundError(f"{data} does not exist: give a .jsonl or a text file")
    else:
        items = parse_file(Path(data), lines=task == "lambada")
    if not items:
        raise ValueError(
            f"{data or SOURCES[task].repo_id} holds no items for {task}: give one with some"
        )
    return items


def from_hub(source: Source) -> list[dict]:
    """The rows of a split, downloaded unless they are in the Hub client's cache."""
    from datasets import Dataset

    try:
        path = hf_hub_download(
            source.repo_id, source.file, revision=PARQUET_REVISION, repo_type="dataset"
        )
    except (OSError, ValueError) as error:  # of the Hub's client or its HTTP library
        raise FileNotFoundError(
            f"{source.repo_id} cannot be read from the Hub: connect to it, or give a local file "
            f"({first_line(error)})"
        ) from error
    return Dataset.from_parquet(path).to_list()


def parse_file(path: Path, lines: bool) -> list[dict]:
    """The items of a local file; of a text that is not JSONL each line is one, or all of it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it to UTF-8") from error
    if path.suffix == ".jsonl":
        return parse_lines(text, str(path))
    parts = re.split(r"\r?\n", text) if lines else [text]
    return [{"text": part} for part in parts if part.strip()]


def parse_lines(text: str, name: str) -> list[dict]:
    """The objects of a JSONL file, blank lines left out; `name` is the file's in errors."""
    items = []
    for number, line in enumerate(text.split("\n"), start=1):  # not at U+2028 and the like
        if not line.strip():
            continue
        try:
            item = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}, is not valid JSON: {error}") from error
        if not isinstance(item, dict):
            raise ValueError(f"{name}, line {number}, is not a JSON object: write {{…}} a line")
        items.append(item)
    return items


def field(item: dict, name: str, kind: type | UnionType, where: str):
    """A field of an item. Raises `ValueError`, with the item's place `where`, if it is missing or of another
    type."""
    if name not in item:
        raise ValueError(
            f"{where} has no field {name!r}: it has {', '.join(map(repr, item)) or 'none'}"
        )
    if not isinstance(item[name], kind):
        expected = getattr(kind, "__name__", kind)
        raise ValueError(f"{where} has {name} = {item[name]!r}: expected {expected}")
    return item[name]


def texts(task: str, items: list[dict]) -> list[str]:
    """The text of each item: its field "text", or the one that the Hub's data set has it in."""
    column = SOURCES[task].column if task in SOURCES else "text"
    found = []
    for number, item in enumerate(items):
        name = column if column in item else "text"
        found.append(field(item, name, str, f"item {number} of {task}"))
    return found
