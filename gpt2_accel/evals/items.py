"""The items of an evaluation: rows of a file, or of HellaSwag on the Hub."""

import zipfile
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from gpt2_accel.data.rows import read_rows, row_suffix
from gpt2_accel.data.sources import read_text
from gpt2_accel.runtime.files import first_line

HELLASWAG = "Rowan/hellaswag"  # a data set of the Hub
FILE = "default/validation/0000.parquet"


class Item(NamedTuple):
    """An item: its fields, and its place for messages, such as file and line."""

    place: str
    fields: dict[str, Any]

    def field(self, name: str, kind: type | UnionType) -> Any:
        """Returns a field. Raises `ValueError` if it is missing or not a `kind`."""
        if name not in self.fields:
            raise ValueError(f"{self.place} has no field {name!r}: add it")
        value = self.fields[name]
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", kind)
            raise ValueError(f"{self.place} has {name} = {value!r}: expected {expected}")
        return value

    def choices(self, name: str, label: str) -> tuple[list[str], int]:
        """Returns the texts of a field, and the index of the right one in the field `label`.

        The index may be a text, as in HellaSwag on the Hub. Raises `ValueError` if a field is
        missing or wrong.
        """
        texts = self.field(name, list)
        if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self.place} has {name} = {texts!r}: expected two strings or more")
        right = self.field(label, int | str)
        if str(right) not in map(str, range(len(texts))):
            raise ValueError(
                f"{self.place} has {label} = {right!r}: expected the index of one of the {name}, "
                f"0 to {len(texts) - 1}"
            )
        return texts, int(right)


def read_items(path: str | Path | zipfile.Path) -> list[Item]:
    """Returns the items of a file of rows, such as `.jsonl` with one object per line; skips blank
    lines. Another file is one item, `{"text": …}`.

    Raises `ValueError` for a row that is not an object, and if there are no items; also the errors
    of `read_rows` and `read_text`.
    """
    if not row_suffix(path):
        return [Item(str(path), {"text": read_text(str(path))})]
    items = []
    for row, place in read_rows(path if isinstance(path, zipfile.Path) else str(path)):
        if not isinstance(row, dict):
            raise ValueError(f"{place}, is not a JSON object: write one {{…}} per line")
        items.append(Item(place, row))
    if not items:
        raise ValueError(f"{path} holds no items: give a file with at least one")
    return items


def hub_items(option: str) -> list[Item]:
    """Returns HellaSwag's items from the Hub, or from the Hub client's cache.

    Reads the Hub's Parquet conversion, so no code of the data set runs. Raises `FileNotFoundError`
    if the Hub cannot be read; the message names `option`, which takes a local file.
    """
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(
            HELLASWAG, FILE, revision="refs/convert/parquet", repo_type="dataset"
        )
    except (OSError, ValueError) as error:  # the Hub client or its HTTP library raises them
        raise FileNotFoundError(
            f"{HELLASWAG} cannot be read from the Hub: connect to it, or give {option} "
            f"({first_line(error)})"
        ) from error
    return read_items(path)
