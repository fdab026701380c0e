"""The results of `token_value.py`: the table of losses, and the share of tokens that Muon needs."""

import json
from pathlib import Path

CORPORA = {"python_stdlib": "Python's library", "shakespeare_char": "tiny Shakespeare"}
NAMES = {"adamw": "AdamW", "muon": "Muon"}
HEAD = ("optimizer", "schedule", "batch", "tokens")


def studies(folder: str | Path) -> list[dict]:
    """Returns the finished study of each model size on each corpus.

    A study has a `title`, the `length` of its sequences, its `runs` and the milliseconds of its `updates`.
    """
    found = []
    for path in sorted(Path(folder).glob("cpu/token_value-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "updates" not in result:  # unfinished
            continue
        corpus = path.stem.partition("-")[2]
        for size in dict.fromkeys(run["trial"]["size"] for run in result["runs"]):
            runs = [run for run in result["runs"] if run["trial"]["size"] == size]
            title = f"{CORPORA.get(corpus, corpus)}, {size}"
            found.append({**result, "title": title, "runs": runs})
    return found


def token_rows(folder: str | Path) -> list[tuple[str, ...]]:
    """Returns the rows below `HEAD` and the studies' titles: the loss at the best learning rate, and that rate."""
    found = studies(folder)
    best = [best_of_each(study["runs"], study["length"]) for study in found]
    kinds = sorted({kind for each in best for kind in each}, key=lambda kind: (-kind[-1], kind))
    rows = []
    for kind in kinds:
        optimizer, schedule, batch, tokens = kind
        cells = (
            f"{each[kind]['loss']:.3f} at {each[kind]['trial']['rate']:.2g}" if kind in each else ""
            for each in best
        )
        rows.append((NAMES[optimizer], schedule, str(batch), f"{tokens / 1e6:.2f}M", *cells))
    return rows


def best_of_each(runs: list[dict], length: int) -> dict[tuple[str, str, int, int], dict]:
    """Returns the run with the lowest loss for each optimizer, schedule, batch and number of tokens."""
    best: dict[tuple[str, str, int, int], dict] = {}
    for run in runs:
        trial = run["trial"]
        schedule = trial["schedule"] + (" to a tenth" if trial["min_ratio"] else "")
        kind = (trial["optimizer"], schedule, trial["sequences"], tokens_of(run, length))
        if kind not in best or run["loss"] < best[kind]["loss"]:
            best[kind] = run
    return best


def tokens_of(run: dict, length: int) -> int:
    """Returns the number of training tokens of a run."""
    return run["trial"]["updates"] * run["trial"]["sequences"] * length


def to_nanogpts_loss(study: dict) -> tuple[float, float] | None:
    """Returns the shares of tokens and time that Muon needs to reach the loss of nanoGPT's settings.

    The study's first run has nanoGPT's settings. The Muon run with the fewest tokens counts; None if no run reaches it.
    """
    first, *rest = study["runs"]
    reached = [
        run for run in rest if run["trial"]["optimizer"] == "muon" and run["loss"] <= first["loss"]
    ]
    if not reached:
        return None
    least = min(reached, key=lambda run: tokens_of(run, study["length"]))
    shares = (
        quantity(least) / quantity(first)
        for quantity in (lambda run: tokens_of(run, 1), lambda run: seconds(run, study))
    )
    return tuple(shares)


def seconds(run: dict, study: dict) -> float:
    """Returns the time of a run's updates in seconds."""
    trial = run["trial"]
    [update] = [
        update
        for update in study["updates"]
        if all(update[name] == trial[name] for name in ("size", "optimizer", "sequences"))
    ]
    return update["milliseconds"]["median"] * trial["updates"] / 1000
