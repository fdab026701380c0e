"""The record of a GPU, which `gpu_checks.py` writes: its tolerances and its rows in the table of
cards."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

# Losses and gradient norms of 20 updates on a CPU in fp32; `gpu_checks.py --record` writes them.
EXPECTED = Path(__file__).with_name("expected.json")
# The largest differences from them: of a loss in nats, and of a gradient norm as a share of it.
# fp32 is TF32 on a GPU, with as many bits as fp16. On a CPU, over five seeds, fp16 differs by up to
# 0.00007 and 0.0002, bf16 by 0.0007 and 0.002. A learning rate that is 5% higher changes a loss by
# at least 0.07; gradients that are not divided by the accumulation change a norm by 1.
TOLERANCES = {"fp32": (0.002, 0.01), "fp16": (0.002, 0.01), "bf16": (0.006, 0.03)}
FIELDS = ("machine", "versions", "commit", "checks", "title", "rows", "updates", "expected")
MACHINE = ("device", "torch", "date")
ROW = ("setting", "tokens_per_second", "memory")
SUMMARIES = {"tokens_per_second", "mfu", "matmul_flops"}
PLAIN = re.compile(r"[\w ,.:;()+/@%&*-]+")  # text that changes neither a table nor the page
NO_CARDS = (
    "No GPU figures yet: [run the checks on yours](hardware.md#checks-and-measurements-on-a-gpu) "
    "and send the file."
)


def difference(actual: dict, expected: dict, precision: str) -> str:
    """Returns the first difference between updates that exceeds the tolerance of `precision`, as a
    sentence, or "". Both have `losses` in nats and `grad_norms`, one value per update."""
    for name, allowed in zip(("losses", "grad_norms"), TOLERANCES[precision], strict=True):
        if len(actual[name]) != len(expected[name]):
            return f"{precision} has {len(actual[name])} {name}, not {len(expected[name])}"
        pairs = zip(actual[name], expected[name], strict=True)
        for update, (value, other) in enumerate(pairs, start=1):
            unit = 1 if name == "losses" else other
            if not math.isfinite(value) or abs(value - other) > allowed * unit:
                where = f"in {name}, update {update}"
                return f"{precision} has {value:.4f} in place of {other:.4f} {where}"
    return ""


def refusal(record: dict) -> str:
    """Returns why a record is refused, or "" if it is accepted."""
    places = [("", record, FIELDS), ("machine.", record.get("machine"), MACHINE)]
    places += [("rows.", row, ROW) for row in record.get("rows") or [None]]
    for place, values, names in places:
        for name in names:
            if not (values or {}).get(name):
                return f"it lacks {place}{name}"
    texts = [record["title"], record["commit"], *(record["machine"][name] for name in MACHINE)]
    for row in record["rows"]:
        texts.append(row["setting"])
        values = [row["memory"]]
        for name in SUMMARIES & row.keys():
            values += [row[name][key] for key in ("median", "low", "high")]
        for value in values:
            if not 0 < value < math.inf:
                return f"a speed or the memory is {value}"
    for text in texts:
        if not PLAIN.fullmatch(text):
            return f"it has other characters than letters, digits and punctuation: {text!r}"
    if record["expected"] != json.loads(EXPECTED.read_text(encoding="utf-8")):
        return "its expected losses and gradient norms are not those of expected.json"
    for name in ("updates", "speed"):
        if name not in record["checks"]:
            return f"it lacks checks.{name}"
    for name, outcome in record["checks"].items():
        if outcome != "passed" and not outcome.startswith("skipped"):
            return f"the check {name} {outcome}"
    for precision, figures in record["updates"].items():
        problem = difference(figures, record["expected"], precision)
        if problem:
            return problem
    return ""


def read_cards(folder: Path, files: Sequence[Path] = ()) -> tuple[list[dict], list[str]]:
    """Returns the rows of the table of cards, and a sentence for each record that is refused.

    Records of others are `files` and those in `contributed/` of the `folder` of results.
    """
    rows = []
    refused = []
    own_record = folder / "cuda" / "card.json"
    paths = [own_record] if own_record.exists() else []
    paths += sorted(folder.glob("contributed/*.json"))
    paths += files
    for path in paths:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            problem = refusal(record)
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            problem = f"it cannot be read as a record: {error!r}"
        if problem:
            refused.append(f"{path} is refused: {problem}")
            continue
        machine = record["machine"]
        name = machine["device"]
        if path != own_record:
            name += " (contributed)"
        remark = f"{record['title']}, torch {machine['torch']}, {machine['date']}"
        remark += f", {record['commit'][:9]}"
        for row in record["rows"]:
            shown = {key: row[key] for key in {*ROW, *SUMMARIES} & row.keys()}
            rows.append(shown | {"name": name, "remark": remark})
    return rows, refused
