"""The results of evaluations: a table, and the file `evaluation.json`."""

from collections.abc import Mapping
from pathlib import Path

from gpt2_accel.files import parse_json

# Hub ids of OpenAI's four checkpoints.
BASELINES = tuple(
    f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
)


def markdown_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Formats results, model -> metric -> value, as a Markdown table: one row per metric, standard errors after "±"."""
    rows = [["metric", *results]]
    for metric in dict.fromkeys(name for found in results.values() for name in found):
        if not metric.endswith("_stderr"):
            rows.append([metric, *(cell(metric, found) for found in results.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    # Aligned, to be readable as plain text.
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def cell(metric: str, results: Mapping[str, float]) -> str:
    """Formats a value with its standard error; empty if the model has none."""
    if metric not in results:
        return ""
    error = results.get(f"{metric}_stderr")
    return f"{results[metric]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def read_record(path: Path) -> dict[str, dict]:
    """Returns the entries of an `evaluation.json`, model -> entry; empty if the file does not exist.

    An entry has `results`, `notes`, `step`, and `weights` and `precision`, which identify what was evaluated. Raises
    `ValueError` if the file holds anything else.
    """
    if not path.exists():
        return {}
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        return {
            name: {"notes": [], **entry, "results": entry["results"]}
            for name, entry in record.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold evaluations: choose another --output") from error


def add_entry(record: dict[str, dict], name: str, entry: dict) -> None:
    """Adds the entry of the model `name` to a record, in place. No other entry changes.

    In an entry of the same weights and precision, the results and notes of each task replace earlier ones. If `name` has
    an entry of others, the new one is under a name with step, weights and precision.
    """
    weights, precision = identity = entry["weights"], entry["precision"]
    old = record.get(name, entry)
    if (old.get("weights"), old.get("precision")) != identity:
        name = f"{name} (step {entry['step']}, weights {weights[:12]}, {precision})"
        old = record.get(name, entry)
    tasks = {metric.partition("/")[0] for metric in entry["results"]}
    kept = {m: x for m, x in old["results"].items() if m.partition("/")[0] not in tasks}
    notes = [note for note in old["notes"] if note.partition(": ")[0] not in tasks]
    record[name] = {
        **entry,
        "results": kept | entry["results"],
        "notes": notes + entry["notes"],
    }
