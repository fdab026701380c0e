"""Prints the results as tables, and writes them between the markers of README.md and docs/.

    python benchmarks/table.py [FILE ...]

Reads `benchmarks/results`. A marker `<!-- bench NAME -->` names a result, a study of
`published.py`, the `headline` (comparisons of several results) or the `cards` (records of `make gpu
PART=tests`; those of others are in `contributed/` or arguments). A record with a check that did not
pass is refused, and the exit code is 1.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cards import NO_CARDS, read_cards
from results import RESULTS, read_results

DOCS = Path(__file__).parent.parent / "docs"
SECTION = re.compile(r"<!-- bench (\w+) -->.*?<!-- /bench \1 -->", re.DOTALL)
# Name in a row -> head, factor and format of a column. A table has the columns of its rows.
COLUMNS: dict[str, tuple[str, float, str]] = {
    "setting": ("setting", 1, ""),
    "time": ("seconds", 1, ",.1f"),
    "tokens_per_second": ("tokens/s", 1, ",.0f"),
    "targets_per_second": ("counted tokens/s", 1, ",.0f"),
    "memory": ("memory, GiB", 2**-30, ".2f"),
    "reserved": ("reserved, GiB", 2**-30, ".2f"),
    "speed_up": ("x its speed", 1, ".2f"),
    "memory_ratio": ("x its memory", 1, ".2f"),
    "gain": ("x the row above", 1, ".2f"),
    "llms_from_scratch": ("LLMs-from-scratch, tokens/s", 1, ",d"),
    "build_nanogpt": ("build-nanogpt, ms", 1, ",d"),
    "remark": ("remark", 1, ""),
}

# The comparisons in the README: result -> task, and rows of this package (first) and of others.
HEADLINE = {
    "gpt2": ("training GPT-2 124M", ("gpt2_accel", "nanoGPT's loop", "HF Trainer")),
    "gpt2_fp32": ("training GPT-2 124M", ("gpt2_accel", "nanoGPT's loop", "HF Trainer")),
    "baby": ("training nanoGPT's CPU model", ("gpt2_accel", "nanoGPT's loop", "HF Trainer")),
    "shakespeare": (
        "tiny Shakespeare to a loss of 1.90, each with its own settings",
        ("`shakespeare_fast.py`", "nanoGPT's loop"),
    ),
    "generation": ("writing with GPT-2 124M", ("gpt2_accel", "generate of transformers")),
    "chat_quickstart": ("chat fine-tuning", ("chat_sft", "SFTTrainer, packed")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="records of others")
    parser.add_argument("--results", default=RESULTS, type=Path, help="folder of the results")
    parser.add_argument("--docs", default=DOCS, type=Path, help="folder of the pages with markers")
    options = parser.parse_args()
    rows, refused = read_cards(options.results, options.files)
    cards = table({"title": "Measured on GPUs", "rows": rows}) if rows else NO_CARDS

    def fill(match: re.Match) -> str:
        content = cards if match[1] == "cards" else section(match[1], options.results)
        print(f"\n{content}")
        return f"<!-- bench {match[1]} -->\n\n{content}\n\n<!-- /bench {match[1]} -->"

    pages = sorted(options.docs.rglob("*.md"))
    pages.append(options.docs.parent / "README.md")
    for path in pages:
        text = path.read_text(encoding="utf-8")
        filled = SECTION.sub(fill, text)
        if filled != text:
            path.write_text(filled, encoding="utf-8")
    if refused:
        sys.exit("\n".join(refused))


def section(name: str, folder: Path = RESULTS) -> str:
    """Returns the tables of a result on each kind of device, or of a study. Raises
    `FileNotFoundError` if it does not exist."""
    if name == "headline":
        return headline(folder)
    results = read_results(name, folder)
    if results:
        return "\n\n".join(map(table, results))
    from published import STUDIES  # needs SciPy

    if name not in STUDIES:
        raise FileNotFoundError(f"{folder} has no {name}.json: measure it first")
    return STUDIES[name](folder)


def table(result: dict) -> str:
    """Returns a result as a title and a Markdown table."""
    rows = result["rows"]
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    title = result["title"].replace(", 1 rounds", ", 1 round")
    settings = {row.get("setting") for row in rows}
    if len(rows) > len(settings) == 1 and "setting" in names:
        names.remove("setting")
        title += f", {settings.pop()}"
    heads = [""]
    heads += [COLUMNS[name][0] for name in names]
    body = []
    for row in rows:
        line = [row["name"]]
        line += [cell(row, name) for name in names]
        body.append(line)
        if "mfu" in row:
            share = spread(row["mfu"], ".0%")
            speed = row["matmul_flops"]["median"] / 1e12
            title += (
                f"; {row['name']} reaches {share} of the {speed:.2f} TFLOP/s of a matrix product"
            )
    if "machine" in result:
        title += f". {place(result['machine'])}"
    return f"{title}:\n\n{markdown(heads, body)}"


def place(machine: dict) -> str:
    """Returns the machine, the date and the versions of a result."""
    text = "{device}, {threads} threads, torch {torch}, {date}".format(**machine)
    if "version" in machine:
        text += f", version {machine['version']}"
    return text


def headline(folder: Path = RESULTS) -> str:
    """Returns a row for each comparison of `HEADLINE` with several rounds, and the machines."""
    rows = []
    places = []
    for name, (task, names) in HEADLINE.items():
        for result in read_results(name, folder):
            ours = named_row(result, names[0])
            title = f"{task} on {result['machine']['device']}"
            for beside_name in names[1:]:
                other = named_row(result, beside_name)
                if other["speed_up"]["low"] == other["speed_up"]["high"]:
                    continue  # one round
                speed = f"{other['speed_up']['median']:.2f} x"
                memory = f"{other['memory_ratio']:.2f} x" if "memory_ratio" in other else ""
                beside = f"{other['name']}, {other['setting']}"
                rows.append([title, ours["setting"], beside, speed, memory])
            where = place(result["machine"])
            if where not in places:
                places.append(where)
    heads = ["", "here", "beside", "speed", "memory"]
    return f"{markdown(heads, rows)}\n\nMeasured on {'; '.join(places)}."


def named_row(result: dict, name: str) -> dict:
    """Returns the first row of a result with a name that begins with `name`."""
    return next(row for row in result["rows"] if row["name"].startswith(name))


def cell(row: dict, name: str) -> str:
    """Formats a value of a row: a text, a number, or the `summary` of several rounds."""
    _, factor, form = COLUMNS[name]
    value = row.get(name, "")
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return spread({key: factor * each for key, each in value.items()}, form)
    return format(factor * value, form)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table."""
    lines = [heads, ["---"] * len(heads)]
    lines += rows
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(summary: dict[str, float], form: str) -> str:
    """Formats median and range, such as `2.31 (2.25 to 2.40)`; a single run has no range."""
    median = format(summary["median"], form)
    if summary["low"] == summary["high"]:
        return median
    return f"{median} ({summary['low']:{form}} to {summary['high']:{form}})"


if __name__ == "__main__":
    main()
