"""The results of `token_value.py` and `architectures.py` as tables."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from gpt2_accel.report.figures import COLOURS, INK, new_figure, set_title

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
    rows = []
    for title, contestants in cases(result).items():
        for name, entries in contestants.items():
            for entry in entries:
                trial = entry["trial"]
                loss, half = interval(entry["losses"])
                tokens = f"{trial['tokens'] / 1e6:.2f}M"
                rows.append((title, name, tokens, f"{loss:.3f} ± {half:.3f}", settings(trial)))
    return rows


def settings(trial: dict) -> str:
    """Describes the settings of a trial, without those that equal the defaults."""
    schedule = trial["schedule"] + (" to a tenth" if trial["min_ratio"] else "")
    parts = [
        f"{trial['rate']:.2g}, {schedule}, {trial['sequences']} sequences",
        f"warmup {trial['warmup']:.0%}, decay {trial['weight_decay']:g}, β2 {trial['beta2']:g}",
    ]
    others = {"embedding_rate": 1.0, "vector_rate": 1.0, "cautious": False, "momentum": 0.95}
    others |= {"momentum_warmup": 0.0, "average": 0.0}
    parts += [
        f"{name.replace('_', ' ')} {text(trial[name])}"
        for name, value in others.items()
        if trial[name] != value
    ]
    return ", ".join(parts)


def text(value: object) -> str:
    """Formats the value of a setting."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def share_text(contestants: dict[str, list[dict]], baseline: str) -> str:
    """Formats `token_share`; a share outside of Muon's two numbers of tokens is not extrapolated."""
    share, half = token_share(contestants, baseline)
    base = contestants[baseline][0]["trial"]["tokens"]
    least, most = (entry["trial"]["tokens"] / base for entry in contestants["Muon"])
    if share < least:
        return f"< {least:.0%}"
    return f"> {most:.0%}" if share > most else f"{share:.1%} ± {half:.1%}"


def share_rows(result: dict) -> list[Row]:
    """Returns the rows of the shares of tokens: case, share of nanoGPT's, share of AdamW's."""
    return [
        (title, *(share_text(found, name) for name in ("nanoGPT", "AdamW")))
        for title, found in cases(result).items()
    ]


def lever_rows(result: dict) -> list[Row]:
    """Returns the rows of the levers: setting, corpus, value found, other value, difference of the loss."""
    return [
        (
            lever["name"].replace("_", " "),
            corpus_title(lever["corpus"]),
            text(lever["found"]),
            text(lever["other"]),
            "{:+.3f} ± {:.3f}".format(
                *interval(
                    [
                        b - a
                        for a, b in zip(lever["found_losses"], lever["other_losses"], strict=True)
                    ]
                )
            ),
        )
        for lever in sorted(result["levers"], key=lambda lever: lever["name"])
    ]


def width_rows(result: dict) -> tuple[Row, list[Row]]:
    """Returns head and rows of the losses by optimizer, width and learning rate. The best of each width is bold."""
    runs = result["widths"]
    rates = sorted({run["rate"] for run in runs})
    kinds = dict.fromkeys((run["optimizer"], run["size"]) for run in runs)
    rows = []
    for kind in kinds:
        losses = {
            run["rate"]: run["loss"] for run in runs if (run["optimizer"], run["size"]) == kind
        }
        best = min(losses.values())
        cells = (
            ""
            if rate not in losses
            else f"**{best:.3f}**"
            if losses[rate] == best
            else f"{losses[rate]:.3f}"
            for rate in rates
        )
        rows.append((OPTIMIZERS[kind[0]], kind[1], *cells))
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


def architecture_rows(result: dict) -> list[Row]:
    """Returns the rows of the architectures: corpus, model, parameters, rate, loss with equal tokens, its difference to
    the model before, milliseconds of an update, and the loss in equal time."""
    rows, before = [], None
    for entry in result["entries"]:
        trial = entry["trial"]
        if trial["model"] == "GPT-2":
            difference = ""
        else:
            paired = [b - a for a, b in zip(before["losses"], entry["losses"], strict=True)]
            difference = "{:+.3f} ± {:.3f}".format(*interval(paired))
        rows.append(
            (
                corpus_title(trial["corpus"]),
                trial["model"],
                f"{entry['parameters']:,}",
                f"{trial['rate']:.2g}",
                "{:.3f} ± {:.3f}".format(*interval(entry["losses"])),
                difference,
                f"{entry['milliseconds']:.1f}",
                "{:.3f} ± {:.3f}".format(*interval(entry["losses_in_time"])),
            )
        )
        before = entry
    return rows
