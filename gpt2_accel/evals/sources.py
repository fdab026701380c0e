"""Reads the items of a benchmark from the Hugging Face Hub or a local file.

The Hub's own Parquet conversion of each data set is read, so no data set script is run (`datasets` no longer runs
them).
"""

import re
from pathlib import Path
from types import UnionType

from gpt2_accel.data.sources import LONGEST_LINE, parse_line, read_text
from gpt2_accel.files import first_line
from gpt2_accel.hf.benchmarks import SOURCES, Source

LARGEST_FILE = 10**9  # bytes of a local file, which is read into memory
PARQUET_REVISION = "refs/convert/parquet"  # the Hub's conversion of every data set


class Item(dict):
    """An item of a local file, and its place there."""

    def __init__(self, fields: dict, place: str):
        super().__init__(fields)
        self.place = place


def place_of(item: dict, number: int, task: str) -> str:
    """Returns how a message names an item: by its file and line, if it has them, or by its number."""
    return getattr(item, "place", f"item {number} of {task}")


def read_items(
    task: str, data: str | Path | None = None, option: str = "a local file"
) -> list[dict]:
    """Returns the items of `task` from the local file `data`, or from the Hub if `data` is None. A message about the Hub
    names the `option` that takes a file.

    A `.jsonl` file has one object per line. The text of any other file is one item, `{"text": …}`; for LAMBADA each
    line is one. Raises `FileNotFoundError` if the file does not exist or the Hub cannot be read, and `ValueError` if
    there are no items, the file is not UTF-8 or a line is not a JSON object.
    """
    if data is None:
        items = from_hub(SOURCES[task], option)
    elif not Path(data).is_file():
        raise FileNotFoundError(f"{data} does not exist: give a .jsonl or a text file")
    else:
        items = parse_file(Path(data), lines=task == "lambada")
    if not items:
        raise ValueError(
            f"{data or SOURCES[task].repo_id} holds no items for {task}: give a file with at least one"
        )
    return items


def from_hub(source: Source, option: str) -> list[dict]:
    """Returns the rows of a split, downloaded unless they are in the Hub client's cache. Raises `FileNotFoundError`, which
    names the `option` that takes a local file, if the Hub cannot be read."""
    from datasets import Dataset
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(
            source.repo_id, source.file, revision=PARQUET_REVISION, repo_type="dataset"
        )
    except (OSError, ValueError) as error:  # from the Hub client or its HTTP library
        raise FileNotFoundError(
            f"{source.repo_id} cannot be read from the Hub: connect to it, or give {option} "
            f"({first_line(error)})"
        ) from error
    return Dataset.from_parquet(path).to_list()


def parse_file(path: Path, lines: bool) -> list[dict]:
    """Returns the items of a local file; unless it is JSONL, each of its `lines` or the whole text is an item.

    Blank items are left out. Raises `ValueError` for an item that is too long to be scored.
    """
    if (size := path.stat().st_size) > LARGEST_FILE:
        raise ValueError(f"{path} has {size:,} bytes, at most {LARGEST_FILE:,} are read: cut it")
    text, is_jsonl = read_text(path), path.suffix == ".jsonl"
    by_line = lines or is_jsonl
    items = []
    # splitlines() would also split at U+2028.
    for number, part in enumerate(re.split(r"\r?\n", text) if by_line else [text], start=1):
        where = f"{path}, line {number}," if by_line else str(path)
        place = where.removesuffix(",")
        if len(part) > LONGEST_LINE:
            raise ValueError(
                f"{where} has {len(part):,} characters, more than the {LONGEST_LINE:,} that an item may have: cut it"
            )
        if not part.strip():
            continue
        item = parse_line(part.encode(), place) if is_jsonl else {"text": part}
        if not isinstance(item, dict):
            raise ValueError(f"{where} is not a JSON object: write one {{…}} per line")
        items.append(Item(item, place))
    return items


def field(item: dict, name: str, kind: type | UnionType, where: str):
    """Returns a field of an item. Raises `ValueError`, naming the item by `where`, if it is missing or not a `kind`."""
    if name not in item:
        raise ValueError(
            f"{where} has no field {name!r}: it has {', '.join(map(repr, item)) or 'none'}"
        )
    if not isinstance(item[name], kind):
        expected = getattr(kind, "__name__", kind)
        raise ValueError(f"{where} has {name} = {item[name]!r}: expected {expected}")
    return item[name]


def texts(task: str, items: list[dict]) -> list[str]:
    """Returns the text of each item, from the field of the Hub's data set or else from "text"."""
    column = SOURCES[task].column if task in SOURCES else "text"
    found = []
    for number, item in enumerate(items):
        name = column if column in item else "text"
        found.append(field(item, name, str, place_of(item, number, task)))
    return found
