"""The record of a model's evaluations, `evaluation.json`: later ones are added to earlier ones."""

from pathlib import Path

from gpt2_accel.files import parse_json

# The figures of an entry are of the same weights in the same precision.
IDENTITY = ("weights", "precision")


def read_record(path: Path) -> dict[str, dict]:
    """The entries of a record, model -> entry, none if it does not exist.

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
        raise ValueError(f"{path} holds something else than evaluations: choose another --output")
    return record


def add_entry(record: dict[str, dict], name: str, entry: dict) -> None:
    """Puts an entry into a record as that of the model `name`.

    A task's figures and notes replace its older ones of the same weights in the same precision; other tasks' stay.
    An entry of other weights, or in another precision, is kept under a name that says which.
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
    """The new entry with what the old one has of tasks that are not in the new one."""
    tasks = {metric.partition("/")[0] for metric in new["results"]}
    tasks |= {note.partition(": ")[0] for note in new["notes"]}
    joined = {"notes": [n for n in old["notes"] if n.partition(": ")[0] not in tasks]}
    joined["notes"] += new["notes"]
    for part in ("results", "conventions"):
        kept = {m: value for m, value in old[part].items() if m.partition("/")[0] not in tasks}
        joined[part] = kept | new[part]
    return {**new, **joined}
