"""`evaluation.json`, the record of evaluations: new results are merged with earlier ones."""

from pathlib import Path

from gpt2_accel.files import parse_json

# Results are merged into one entry only for the same weights in the same precision.
IDENTITY = ("weights", "precision")


def read_record(path: Path) -> dict[str, dict]:
    """Returns the entries of a record, model -> entry; empty if the file does not exist.

    Raises `ValueError` if the file holds anything else.
    """
    if not path.exists():
        return {}
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        parts = {"results": dict, "conventions": dict, "notes": list}
        wrong = not all(isinstance(e[name], parts[name]) for e in record.values() for name in parts)
    except (ValueError, KeyError, TypeError, AttributeError):
        wrong = True
    if wrong:
        raise ValueError(f"{path} does not hold evaluations: choose another --output")
    return record


def add_entry(record: dict[str, dict], name: str, entry: dict) -> None:
    """Adds the entry of the model `name` to a record, in place.

    A task's results and notes replace earlier ones of the same weights and precision; other tasks keep theirs. An
    earlier entry of other weights or another precision is kept under a name with its step, weights and precision.
    """
    same = [
        key
        for key, old in record.items()
        if (key == name or key.startswith(f"{name} (step "))
        and all(old.get(part) == entry[part] for part in IDENTITY)
    ]
    for key in same:
        entry = merged(record.pop(key), entry)
    if (other := record.pop(name, None)) is not None:
        step, weights = other.get("step"), str(other.get("weights"))[:12]
        record[f"{name} (step {step}, weights {weights}, {other.get('precision')})"] = other
    record[name] = entry


def merged(old: dict, new: dict) -> dict:
    """Returns the new entry with the old entry's results and notes of all other tasks."""
    tasks = {metric.partition("/")[0] for metric in new["results"]}
    tasks |= {note.partition(": ")[0] for note in new["notes"]}
    joined = {"notes": [n for n in old["notes"] if n.partition(": ")[0] not in tasks]}
    joined["notes"] += new["notes"]
    for part in ("results", "conventions"):
        kept = {m: value for m, value in old[part].items() if m.partition("/")[0] not in tasks}
        joined[part] = kept | new[part]
    return {**new, **joined}
