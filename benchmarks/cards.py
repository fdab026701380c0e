"""The record of a GPU that `gpu_checks.py` writes: how far its updates may differ, and the rows of the table of cards."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

# The losses and gradient norms of 20 updates on a CPU in fp32: `python benchmarks/gpu_checks.py --record` writes them.
EXPECTED = Path(__file__).with_name("expected.json")
# The largest difference from them: of a loss in nats, and of a gradient norm as a share of it. fp32 is TF32 on a GPU, with
# as many bits as fp16. On a CPU, over five seeds, fp16 differs by up to 0.00007 and 0.0002, bf16 by 0.0007 and 0.002; a
# learning rate of 1.05 times changes a loss by 0.07 at least, gradients that are not divided a norm by 1.
TOLERANCES = {"fp32": (0.002, 0.01), "fp16": (0.002, 0.01), "bf16": (0.006, 0.03)}
FIELDS = ("machine", "versions", "commit", "checks", "title", "rows", "updates", "expected")
MACHINE = ("device", "torch", "date")
ROW = ("setting", "tokens_per_second", "memory")
NO_CARDS = (
    "No GPU figures yet: [run the checks on yours](hardware.md#checks-and-measurements-on-a-gpu) "
    "and send the file."
)


def difference(found: dict, expected: dict, precision: str) -> str:
    """Returns how the updates of a run differ from the expected ones by more than the tolerance of its precision; an empty
    text if they do not. Both have `losses` in nats and `grad_norms`, a value for each update."""
    for name, allowed in zip(("losses", "grad_norms"), TOLERANCES[precision], strict=True):
        if len(found[name]) != len(expected[name]):
            return f"{precision} has {len(found[name])} {name}, not {len(expected[name])}"
        for update, pair in enumerate(zip(found[name], expected[name], strict=True), start=1):
            own, other = pair
            unit = 1 if name == "losses" else other
            if not math.isfinite(own) or abs(own - other) > allowed * unit:
                return (
                    f"{precision} has {own:.4f} in place of {other:.4f} in {name}, update {update}"
                )
    return ""


def refusal(record: dict) -> str:
    """Returns why a record is refused; an empty text if it is accepted."""
    places = [("", record, FIELDS), ("machine.", record.get("machine"), MACHINE)]
    places += [("rows.", row, ROW) for row in record.get("rows") or [None]]
    for place, values, names in places:
        for name in names:
            if not (values or {}).get(name):
                return f"it lacks {place}{name}"
    for name in ("updates", "speed"):
        if name not in record["checks"]:
            return f"it lacks checks.{name}"
    for name, outcome in record["checks"].items():
        if outcome != "passed" and not outcome.startswith("skipped"):
            return f"the check {name} {outcome}"
    for precision, found in record["updates"].items():
        if problem := difference(found, record["expected"], precision):
            return problem
    return ""


def read_cards(folder: Path, files: Sequence[Path] = ()) -> tuple[list[dict], list[str]]:
    """Returns a row of the table for each card, and a sentence for each record that is refused.

    Records that others made are `files` and those in `contributed/` of the `folder` of results.
    """
    rows = []
    refused = []
    own = folder / "cuda" / "card.json"
    for path in [own, *sorted(folder.glob("contributed/*.json")), *files]:
        if path == own and not own.exists():
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            problem = refusal(record)
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            problem = f"it cannot be read as a record: {error!r}"
        if problem:
            refused.append(f"{path} is refused: {problem}")
            continue
        machine = record["machine"]
        about = f"{record['title']}, torch {machine['torch']}, {machine['date']}, {record['commit'][:9]}"
        mark = "" if path == own else " (contributed)"
        rows += [
            {**row, "name": machine["device"] + mark, "remark": about} for row in record["rows"]
        ]
    return rows, refused
