"""The results of `token_value.py` and `architectures.py` as rows of tables, and pictures of results."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from gpt2_accel.report.figures import COLOURS, INK, NARROW, new_figure, set_title

CORPORA = {"python_stdlib": "Python's library", "shakespeare_char": "tiny Shakespeare"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
# 97.5% quantiles of Student's t, by the number of runs
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
Row = tuple[str, ...]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and half the width of its 95% interval, by Student's t."""
    return mean(values), T95[len(values)] * stdev(values) / math.sqrt(len(values))


def tokens_to(loss: float, tokens: Sequence[int], losses: Sequence[float]) -> float:
    """Returns the tokens at which a contestant has `loss`: on the line through its two runs, over the logarithm of tokens."""
    (x1, x2), (y1, y2) = map(math.log, tokens), losses
    return math.exp(x1 + (loss - y1) * (x2 - x1) / (y2 - y1))


def precision(contestant: dict) -> str:
    """Describes the precision of a contestant's training, and whether it is compiled."""
    return ("bf16" if contestant["bf16"] else "fp32") + ", compiled" * contestant["compile"]


def plus_minus(values: Sequence[float], form: str = ".3f") -> str:
    """Formats `interval`."""
    return "{:{form}} ± {:.3f}".format(*interval(values), form=form)


def difference(losses: Sequence[float], others: Sequence[float]) -> str:
    """Formats how far the losses of the other runs lie above those of runs with the same seeds."""
    return plus_minus([b - a for a, b in zip(losses, others, strict=True)], "+.3f")


def cases(result: dict) -> dict[str, dict[str, list[dict]]]:
    """Returns the finals by case and contestant: title -> name -> its entries, one for each number of tokens."""
    found: dict[str, dict[str, list[dict]]] = {}
    for entry in result["finals"]:
        title = f"{corpus_title(entry['trial']['corpus'])}, {entry['trial']['size']}"
        found.setdefault(title, {}).setdefault(entry["name"], []).append(entry)
    return found


def corpus_title(folder: str) -> str:
    """Returns a corpus as the tables name it."""
    name = folder.rpartition("/")[2]
    return CORPORA.get(name, name)


def token_share(contestants: dict[str, list[dict]], baseline: str) -> tuple[float, float]:
    """Returns the share of the baseline's tokens at which Muon has its loss: the mean over the seeds, and half the width
    of the 95% interval."""
    [base], muon = contestants[baseline], contestants["Muon"]
    tokens = [entry["trial"]["tokens"] for entry in muon]
    return interval(
        [
            tokens_to(loss, tokens, losses) / base["trial"]["tokens"]
            for loss, *losses in zip(base["losses"], *(m["losses"] for m in muon), strict=True)
        ]
    )


def final_rows(result: dict) -> list[Row]:
    """Returns the rows of the finals: case, contestant, tokens, loss, settings."""
    return [
        (
            title,
            name,
            f"{entry['trial']['tokens'] / 1e6:.2f}M",
            plus_minus(entry["losses"]),
            settings(entry["trial"]),
        )
        for title, contestants in cases(result).items()
        for name, entries in contestants.items()
        for entry in entries
    ]


def settings(trial: dict) -> str:
    """Describes the settings of a trial; of the levers those that differ from the defaults."""
    schedule = trial["schedule"] + (" to a tenth" if trial["min_ratio"] else "")
    parts = [
        f"{trial['rate']:.2g}, {schedule}, {trial['sequences']} sequences",
        f"warmup {trial['warmup']:.0%}, decay {trial['weight_decay']:g}, β2 {trial['beta2']:g}",
    ]
    levers = {"embedding_rate": 1.0, "vector_rate": 1.0, "cautious": False, "momentum": 0.95}
    levers |= {"momentum_warmup": 0.0, "average": 0.0}
    changed = [name for name, value in levers.items() if trial[name] != value]
    return ", ".join(parts + [f"{name.replace('_', ' ')} {text(trial[name])}" for name in changed])


def text(value: bool | float) -> str:
    """Formats the value of a lever."""
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:.3g}"


def share_text(contestants: dict[str, list[dict]], baseline: str) -> str:
    """Formats `token_share`; a share outside of Muon's two numbers of tokens is not extrapolated."""
    share, half = token_share(contestants, baseline)
    base = contestants[baseline][0]["trial"]["tokens"]
    least, most = (entry["trial"]["tokens"] / base for entry in contestants["Muon"])
    if share < least:
        return f"< {least:.0%}"
    return f"> {most:.0%}" if share > most else f"{share:.1%} ± {half:.1%}"


def lever_rows(result: dict) -> list[Row]:
    """Returns the rows of the levers: setting, corpus, value found, other value, difference of the loss."""
    return [
        (
            lever["name"].replace("_", " "),
            corpus_title(lever["corpus"]),
            text(lever["found"]),
            text(lever["other"]),
            difference(lever["found_losses"], lever["other_losses"]),
        )
        for lever in sorted(result["levers"], key=lambda lever: lever["name"])
    ]


def width_rows(result: dict) -> tuple[Row, list[Row]]:
    """Returns head and rows of the losses by optimizer, width and learning rate. The best of each width is bold."""
    rates = sorted({run["rate"] for run in result["widths"]})
    kinds: dict[tuple[str, str], dict[float, float]] = {}
    for run in result["widths"]:
        kinds.setdefault((run["optimizer"], run["size"]), {})[run["rate"]] = run["loss"]
    rows = []
    for (optimizer, size), losses in kinds.items():
        cells = {rate: f"{loss:.3f}" for rate, loss in losses.items()}
        best = min(losses, key=losses.get)
        cells[best] = f"**{cells[best]}**"
        rows.append((OPTIMIZERS[optimizer], size, *(cells.get(rate, "") for rate in rates)))
    return ("optimizer", "size", *(f"{rate:.2g}" for rate in rates)), rows


def draw_widths(result: dict, path: str | Path) -> None:
    """Draws the loss over the peak learning rate, one panel for each optimizer and one line for each width, as PNG."""
    figure, [panels] = new_figure(9, 3.4, columns=2)
    for panel, (optimizer, name) in zip(panels, OPTIMIZERS.items(), strict=True):
        runs = [run for run in result["widths"] if run["optimizer"] == optimizer]
        sizes = dict.fromkeys(run["size"] for run in runs)
        for size, colour in zip(sizes, COLOURS, strict=False):
            points = sorted((run["rate"], run["loss"]) for run in runs if run["size"] == size)
            panel.plot(*zip(*points, strict=True), "o-", color=colour, label=size, markersize=4)
            panel.plot(*min(points, key=lambda point: point[1]), "o", color=colour, markersize=9)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.2g}")
        panel.set_xlabel("peak learning rate")
        set_title(panel, f"{name}: loss by learning rate")
        panel.legend(frameon=False, labelcolor=INK, fontsize=8)
    figure.savefig(path, facecolor="white")


def draw_trainers(result: dict, path: str | Path) -> None:
    """Draws the speed and the memory of all contestants but the bare loop as bars, as SVG for a phone's width."""
    from matplotlib import rc_context

    shown = {name: own for name, own in result["contestants"].items() if name != "bare loop"}
    names = [name.replace(", ", ",\n") + f"\n{precision(own)}" for name, own in shown.items()]
    speeds = [own["tokens_per_second"]["median"] for own in shown.values()]
    memories = [own["memory"] / 2**30 for own in shown.values()]
    figure, [panels] = new_figure(NARROW, 2.6, columns=2)
    for panel, title, values in zip(
        panels, ("tokens/s", "peak memory, GiB"), (speeds, memories), strict=True
    ):
        colours = [COLOURS[0], *["#80868b"] * (len(names) - 1)]
        bars = panel.barh(names, values, 0.6, color=colours)
        panel.bar_label(bars, fmt="{:,.3g}", padding=3, fontsize=9, color=INK)
        panel.set(xlim=(0, 1.35 * max(values)), xticks=[])
        panel.grid(False)
        panel.invert_yaxis()
        set_title(panel, title)
    panels[0].tick_params(length=0, labelsize=9)
    panels[1].set_yticks([])
    with rc_context({"svg.hashsalt": "trainers"}):  # the same file from the same results
        figure.savefig(path, facecolor="white", metadata={"Date": None})


def architecture_rows(result: dict) -> list[Row]:
    """Returns the rows of the architectures: corpus, model, parameters, rate, loss with equal tokens, its difference to
    the model before, milliseconds of an update, and the loss in equal time."""
    rows, before = [], []
    for entry in result["entries"]:
        trial, losses = entry["trial"], entry["losses"]
        rows.append(
            (
                corpus_title(trial["corpus"]),
                trial["model"],
                f"{entry['parameters']:,}",
                f"{trial['rate']:.2g}",
                plus_minus(losses),
                "" if trial["model"] == "GPT-2" else difference(before, losses),
                f"{entry['milliseconds']:.1f}",
                plus_minus(entry["losses_in_time"]),
            )
        )
        before = losses
    return rows
