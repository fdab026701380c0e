"""Prints the benchmark results as tables, and writes them between the markers of the pages in docs/.

    python benchmarks/table.py

Reads `benchmarks/results`; missing results are marked as not measured. Writes the pages' pictures to `images/` too.
"""

import argparse
import shutil
from pathlib import Path

from published import optimizers, rates, scaling
from results import RESULTS, read_result

from gpt2_accel.report.figures import COLOURS, INK, NARROW, new_figure, set_title

DOCS = Path(__file__).parent.parent / "docs"
NOT_MEASURED, NO_GPU = "not measured", "no GPU available"
TITLES = {"baby": "nanoGPT's CPU model", "qwen3": "Qwen3 of the size of GPT-2 124M"}
Summary = dict[str, float]
Row = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=RESULTS, type=Path, help="folder of the results")
    parser.add_argument("--docs", default=DOCS, type=Path, help="folder of the pages with markers")
    options = parser.parse_args()
    pages = {path: path.read_text(encoding="utf-8") for path in options.docs.rglob("*.md")}
    for section in SECTIONS:
        begin, end = (f"<!-- {slash}bench {section.__name__} -->" for slash in ("", "/"))
        found = section(options.results) or "Not measured."
        print(f"\n{found}")
        places = [path for path, text in pages.items() if text.count(begin) == text.count(end) == 1]
        if len(places) != 1:
            raise ValueError(f"one page needs the markers {begin} and {end}, once each")
        [path] = places
        before, rest = pages[path].split(begin)
        pages[path] = f"{before}{begin}\n\n{found}\n\n{end}{rest.split(end)[1]}"
        path.write_text(pages[path], encoding="utf-8")
    images = options.docs / "images"
    images.mkdir(exist_ok=True)
    if (picture := options.results / "cpu/ladder/speed_ladder.png").exists():
        shutil.copyfile(picture, images / picture.name)
    if result := read_result("training-gpt2", "cpu", options.results):
        draw_trainers(result, images / "trainers.svg")


def aims(folder: str | Path) -> str:
    """Returns the table of aims and measurements."""
    names = ("training-gpt2", "training-baby", "generate")
    gpt2, baby, generate = (read_result(name, "cpu", folder) for name in names)
    sizes = ("gpt2", "micro_batch")
    gpu, large = (read_result(f"training-{name}", "cuda", folder) for name in sizes)
    cpu, rows = "124M on a CPU", []
    for what, other, speed, memory in (
        (f"{cpu} against HF's Trainer in bf16, uncompiled", "HF Trainer", 2.2, 0.6),
        (
            "… HF's with `GPT2Config`'s default dropout, ours without",
            "HF Trainer, its dropout",
            2.2,
            0.6,
        ),
        (f"{cpu} against a plain loop in fp32", "plain loop", 4.5, 0.55),
    ):
        rows.append(compare(what, "≥", speed, pick(gpt2, "speed", other)))
        rows.append(compare("… its memory", "≤", memory, pick(gpt2, "memory", other)))
    ceiling = "share of the bf16 matmul ceiling"
    loop = "the whole loop over a bare one with the same kernels"
    sample = "generation, batch 1, bf16, against HF's `generate`"
    rows += [
        compare(f"{cpu}: {ceiling}", "≥", 0.4, pick(gpt2, "mfu"), "%", 0),
        shakespeare_row(read_result("shakespeare", "cpu", folder)),
        compare(f"{loop}, 124M", "≤", 0.02, pick(gpt2, "overhead"), "%", 1),
        compare(f"{loop}, nanoGPT's CPU model", "≤", 0.05, pick(baby, "overhead"), "%", 1),
        compare(sample, "≥", 1.5, best_generation(generate)),
        gpu_speed(large),
        compare(f"124M on a GPU: {ceiling}", "≥", 0.5, pick(gpu, "mfu"), "%", 0, NO_GPU),
    ]
    for what, other, aim in (
        ("HF's Trainer, compiled", "HF Trainer", 1.5),
        ("nanoGPT's loop", "plain loop", 1.15),
    ):
        found = pick(gpu, "speed", other)
        rows.append(compare(f"124M on a GPU against {what}", "≥", aim, found, missing=NO_GPU))
    return markdown(("what", "aim", "measured", "reached"), rows)


def pick(result: dict | None, *names: str):
    """Returns what a result has under the names, one in the other, or None."""
    for name in names:
        result = result and result.get(name)
    return result


def compare(
    what: str,
    sign: str,
    aim: float,
    found: Summary | float | None,
    unit: str = " x",
    digits: int = 2,
    missing: str = NOT_MEASURED,
) -> Row:
    """Returns the row of an aim of at least (≥) or at most (≤) `aim`; `missing` replaces a measurement that is None.

    The aim is reached if all rounds reach it, and not decided if some do.
    """
    scale = 100 if unit == "%" else 1
    goal = f"{sign} {aim * scale:,g}{unit}"
    if found is None:
        return what, goal, missing, ""
    if isinstance(found, float):
        measured, found = f"{found:.{digits}f}{unit}", {"low": found, "high": found}
    else:
        scaled = {name: value * scale for name, value in found.items()}
        measured = spread(scaled, unit, digits)
    worst, best = (found["low"], found["high"]) if sign == "≥" else (-found["high"], -found["low"])
    least = aim if sign == "≥" else -aim
    return what, goal, measured, verdict(worst >= least, best >= least)


def verdict(all_rounds: bool, some_round: bool) -> str:
    """Returns whether an aim is reached."""
    if all_rounds:
        return "yes"
    return "not decided" if some_round else "no"


def gpu_speed(result: dict | None) -> Row:
    """Returns the row of the speed on a GPU; the aim is for an H100."""
    found = pick(result, "contestants", "gpt2_accel", "tokens_per_second")
    row = compare("124M on one H100: tokens/s", "≥", 430_000, found, "", 0, NO_GPU)
    return row if result and "H100" in result["machine"]["device"] else (*row[:3], "")


def shakespeare_row(result: dict | None) -> Row:
    """Returns the row of tiny Shakespeare, with the time and the loss of both processes."""
    recipe = "`shakespeare_fast.py`, another recipe"
    what = f"tiny Shakespeare to a loss of 1.90: {recipe}, against nanoGPT's CPU settings"
    aim = 4.0
    if not result or "missing" in result:
        missing = f"{NOT_MEASURED}: {result['missing']}" if result else NOT_MEASURED
        return compare(what, "≥", aim, None, missing=missing)
    what, goal, measured, reached = compare(what, "≥", aim, result["speed"])
    own, other = (
        f"{result[name]['time']['median']:.1f} s, loss {max(result[name]['loss']):.3f}"
        for name in ("recipe", "nanogpt")
    )
    if max(result["recipe"]["loss"]) > result["goal"]:
        reached = "no"
    return what, goal, f"{measured}: {own}, against {other}", reached


def best_generation(result: dict | None) -> Summary | None:
    """Returns the speedup over HF for batch 1 in bf16, compiled or not, whichever is faster."""
    found = [
        entry["speed"]
        for entry in (result["rows"] if result else [])
        if (entry["dtype"], entry["batch_size"]) == ("bfloat16", 1)
        and entry["name"].startswith("gpt2")
    ]
    return max(found, key=lambda speed: speed["median"], default=None)


def trainers(folder: str | Path) -> str:
    """Returns the tables of all contestants on all kinds of device."""
    found = (
        (size, read_result(f"training-{size}", kind, folder))
        for kind in ("cpu", "cuda")
        for size in ("gpt2", "baby")
    )
    return "\n\n".join(training(size, result) for size, result in found if result)


def training(size: str, result: dict) -> str:
    """Returns the table of the contestants of one size, with the measured ratios to the first of them."""
    ratios = result.get("speed", {})
    head = ("training", "precision", "tokens/s", "peak memory, GiB")
    rows = []
    for name, own in result["contestants"].items():
        speed = spread(own["tokens_per_second"], digits=0)
        cells = (name, precision(own), speed, f"{own['memory'] / 2**30:.2f}")
        if name in ratios:
            cells += (spread(ratios[name], " x"), f"{result['memory'][name]:.2f} x")
        rows.append(cells + ("",) * (2 * bool(ratios) + len(head) - len(cells)))
    head += ("speed-up over it", "memory relative to it") if ratios else ()
    title = TITLES.get(size, "GPT-2 124M")
    title += f", {result['batch_size']} x {result['shape']['n_positions']:,} tokens an update"
    title += f", {len(own['seconds'])} rounds"
    if "ceiling" in result:
        title += f"; bf16 matmul {result['ceiling']['median'] / 1e12:.2f} TFLOP/s"
    return table(result, f"{title}.", head, rows)


def parts(folder: str | Path) -> str:
    """Returns the table of `parts.py`."""
    if not (result := read_result("parts", "cpu", folder)):
        return ""
    preparation, checkpoint = result["preparation"], result["checkpoint"]
    if "missing" in preparation:
        prepared = f"{NOT_MEASURED}: {preparation['missing']}"
    else:
        prepared = (
            f"{preparation['speed']:.1f} MB/s with {preparation['workers']} workers; "
            f"tiktoken on one core {preparation['tiktoken']:.1f} MB/s"
        )
    saved = (
        f"{spread(checkpoint['save'], ' s')}; a bare copy takes {spread(checkpoint['copy'], ' s')}"
    )
    rows = [
        ("`import gpt2_accel.train`", spread(result["import"], " s", 1)),
        ("a command to its first update, tiny model", spread(result["first_update"], " s", 1)),
        ("batches, 8 x 1,024 tokens", f"{result['loader']['median'] / 1e6:.1f}M tokens/s"),
        ("tokenizing text into shards, GPT-2's BPE", prepared),
        ("a checkpoint of 124M blocks the loop for", saved),
    ]
    return table(result, "", ("part", "measured"), rows)


def qwen3(folder: str | Path) -> str:
    """Returns the table of Qwen3's speed and memory."""
    result = read_result("training-qwen3", "cpu", folder)
    return training("qwen3", result) if result else ""


def precision(contestant: dict) -> str:
    """Describes the precision of a contestant's training, and whether it is compiled."""
    return ("bf16" if contestant["bf16"] else "fp32") + ", compiled" * contestant["compile"]


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


def ladder(folder: str | Path) -> str:
    """Returns the speed ladder's tables of all kinds of device, from `ladder/` in the results."""
    found = (Path(folder) / kind / "ladder" / "speed_ladder.md" for kind in ("cpu", "cuda"))
    texts = [path.read_text(encoding="utf-8").strip() for path in found if path.exists()]
    return "\n\n".join(text.lstrip("# ") for text in texts)


def generation(folder: str | Path) -> str:
    """Returns the tables of generation of all kinds of device, with a row per dtype and batch."""
    tables = []
    for result in filter(None, (read_result("generate", kind, folder) for kind in ("cpu", "cuda"))):
        names = list(dict.fromkeys(entry["name"] for entry in result["rows"]))
        cells: dict[tuple[str, int], dict[str, str]] = {}
        for entry in result["rows"]:
            text = f"{entry['tokens_per_second']['median']:.1f}"
            if entry["name"].startswith("gpt2"):
                text += f" ({entry['speed']['median']:.2f} x)"
            cells.setdefault((entry["dtype"], entry["batch_size"]), {})[entry["name"]] = text
        rows = [
            (dtype, str(batch), *(cell.get(name, "") for name in names))
            for (dtype, batch), cell in cells.items()
        ]
        title = (
            f"{result['size']}, a prompt of {result['prompt_tokens']} tokens and {result['new_tokens']} "
            f"new ones, {result['rounds']} rounds: tokens/s, and the median of the rounds' ratios to HF."
        )
        tables.append(table(result, title, ("dtype", "batch", *names), rows))
    return "\n\n".join(tables)


def gpu(folder: str | Path) -> str:
    """Returns the tables of the trainings on a GPU that no other section has."""
    found = (
        read_result(f"training-{name}", "cuda", folder) for name in ("micro_batch", "switches")
    )
    tables = [training("gpt2", result) for result in found if result]
    return "\n\n".join(tables) or f"`make gpu`: {NOT_MEASURED}, {NO_GPU}."


def table(result: dict, title: str, head: Row, rows: list[Row]) -> str:
    """Returns a table under its title, machine and date."""
    return f"{title} {describe_machine(result)}\n\n{markdown(head, rows)}".lstrip()


def describe_machine(result: dict) -> str:
    """Describes the machine and the date of a result."""
    machine = result["machine"]
    threads = ""
    if machine["type"] == "cpu":
        threads = f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return f"{machine['device']}{threads}, torch {machine['torch']}, {machine['date']}:"


def spread(found: Summary, unit: str = "", digits: int = 2) -> str:
    """Formats median and range, such as `2.31 x (2.25 to 2.40)`; a single run has no range."""
    median, low, high = (f"{found[name]:,.{digits}f}" for name in ("median", "low", "high"))
    if found["low"] == found["high"]:
        return f"{median}{unit}, one run"
    return f"{median}{unit} ({low} to {high})"


def markdown(head: Row, rows: list[Row]) -> str:
    """Formats a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


SECTIONS = (aims, trainers, generation, gpu, parts, qwen3, ladder, scaling, rates, optimizers)

if __name__ == "__main__":
    main()
