"""Results of evaluations: tables, and the file `evaluation.json`."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from gpt2_accel.runtime.files import read_json


def markdown(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are aligned in plain text. The first of `heads` is
    the head of the row titles; `rows` maps these to cells."""
    lines = [list(heads)] + [[title, *cells] for title, cells in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def rows_of(columns: Sequence[Mapping[str, object]]) -> dict[str, list[str]]:
    """Returns the rows of a table from its columns, which map row titles to cells; a title that a
    column lacks gets an empty cell."""
    titles = chain.from_iterable(columns)
    return {title: [str(column.get(title, "")) for column in columns] for title in titles}


def read_record(path: Path) -> dict[str, dict]:
    """Returns the entries of an `evaluation.json`, name -> entry; empty if the file does not
    exist.

    An entry has `results`, `notes`, `step`, and `weights` and `precision`, which identify the
    evaluated model. Raises `ValueError` if the file has another content.
    """
    record: dict[str, dict] = {}
    if not path.exists():
        return record
    try:
        for name, entry in read_json(path).items():
            entry["results"].keys()
            record[name] = {"notes": []} | entry
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold evaluations: choose another --output") from error
    return record


def add_entry(record: dict[str, dict], name: str, entry: dict) -> None:
    """Adds the entry of the model `name` to a record, in place. Other entries do not change.

    The entry's name includes step, weights and precision. If there is one of that name, the results
    and notes of each task replace earlier ones.
    """
    weights = entry["weights"][:12]
    name = f"{name} (step {entry['step']}, weights {weights}, {entry['precision']})"
    old = record.get(name, entry)
    tasks = {metric.partition("/")[0] for metric in entry["results"]}
    kept = {m: x for m, x in old["results"].items() if m.partition("/")[0] not in tasks}
    notes = [note for note in old["notes"] if note.partition(": ")[0] not in tasks]
    record[name] = entry | {"results": kept | entry["results"], "notes": notes + entry["notes"]}
