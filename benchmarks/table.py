"""The benchmarks' figures as tables, printed and put into docs/performance.md between its markers.

    python benchmarks/table.py

Reads what the benchmarks left in `benchmarks/results`. What is not there is marked as not measured. The speed ladder's
picture is copied into `images/` beside the page.
"""

import argparse
import shutil
from pathlib import Path

from results import RESULTS, read_result
from token_table import HEAD, studies, to_nanogpts_loss, token_rows

PAGE = Path(__file__).parent.parent / "docs/performance.md"
NOT_MEASURED, NO_GPU = "not measured", "no GPU at hand"
Summary = dict[str, float]
Row = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=RESULTS, help="folder of the figures")
    parser.add_argument("--page", default=PAGE, help="file whose markers are filled")
    options = parser.parse_args()
    kinds = ("cpu", "cuda")
    sections = {
        "bench": "\n\n".join(
            filter(
                None, (targets(options.results), *(speeds(kind, options.results) for kind in kinds))
            )
        ),
        "bench tokens": tokens(options.results),
        "bench generation": generation(options.results),
        "bench ladder": ladder(options.results),
    }
    page = Path(options.page)
    text = page.read_text(encoding="utf-8")
    for name, section in sections.items():
        print(f"\n{section}")
        text = fill(text, name, section)
    page.write_text(text, encoding="utf-8")
    picture = Path(options.results) / "cpu" / "ladder" / "speed_ladder.png"
    if picture.exists():
        (page.parent / "images").mkdir(exist_ok=True)
        shutil.copyfile(picture, page.parent / "images" / picture.name)


def fill(text: str, name: str, section: str) -> str:
    """`text` with `section` between the markers called `name`. Raises `ValueError` if they are not there."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(
            f"the page needs the markers {begin} and {end}, once each: put them where the tables go"
        )
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{section}\n\n{end}{rest.split(end)[1]}"


def targets(folder: str | Path) -> str:
    """What is aimed at, beside what was measured."""
    gpt2, baby, shakespeare, generate = (
        read_result(name, "cpu", folder)
        for name in ("training-gpt2", "training-baby", "shakespeare", "generate")
    )
    gpu = read_result("training-gpt2", "cuda", folder)
    rows = [
        *against(
            gpt2,
            "124M on a CPU against HF's Trainer in bf16, both without dropout",
            "HF Trainer",
            2.2,
            0.6,
        ),
        *against(
            gpt2, "… with `GPT2Config`'s dropout, as it comes", "HF Trainer, its dropout", 2.2, 0.6
        ),
        *against(gpt2, "124M on a CPU against a plain loop in fp32", "plain loop", 4.5, 0.55),
        share("124M on a CPU: share of the bf16 matmul ceiling", gpt2, 0.4),
        shakespeare_row(shakespeare),
        tokens_row(folder),
        overhead("124M", gpt2, 0.02),
        overhead("the baby's size", baby, 0.05),
        speedup(
            "generation, batch 1, bf16, against HF's `generate`", best_generation(generate), 1.5
        ),
        share("124M on a GPU: share of the bf16 matmul ceiling", gpu, 0.55, NO_GPU),
        speedup(
            "124M on a GPU against HF's Trainer, compiled",
            gpu and gpu["speed"]["HF Trainer"],
            1.5,
            NO_GPU,
        ),
        speedup(
            "124M on a GPU against nanoGPT's loop", gpu and gpu["speed"]["plain loop"], 1.3, NO_GPU
        ),
    ]
    return markdown(("what", "aim", "measured", "reached"), rows)


def against(result: dict | None, what: str, other: str, speed: float, memory: float) -> list[Row]:
    """The rows of speed and of memory beside another contestant."""
    share = result and result["memory"].get(other)
    return [
        speedup(what, result and result["speed"].get(other), speed),
        row(
            "… its memory", f"≤ {memory:g} x", share and f"{share:.2f} x", share and share <= memory
        ),
    ]


def speedup(what: str, found: Summary | None, aim: float, missing: str = NOT_MEASURED) -> Row:
    """A row of a ratio of speeds that should be at least `aim`."""
    return row(
        what,
        f"≥ {aim:g} x",
        found and spread(found, " x"),
        found and found["median"] >= aim,
        missing,
    )


def share(what: str, result: dict | None, aim: float, missing: str = NOT_MEASURED) -> Row:
    """A row of a share of the ceiling that should be at least `aim`."""
    found = result and result["mfu"]
    return row(
        what, f"≥ {aim:.0%}", found and percent(found, 0), found and found["median"] >= aim, missing
    )


def overhead(size: str, result: dict | None, aim: float) -> Row:
    """A row of what the loop costs beyond a bare one, which should be at most `aim`."""
    found = result and result["overhead"]
    what = f"the whole loop over a bare one with the same kernels, {size}"
    return row(what, f"≤ {aim:.0%}", found and percent(found, 1), found and found["median"] <= aim)


def shakespeare_row(result: dict | None) -> Row:
    """The row of tiny Shakespeare."""
    what, aim = "tiny Shakespeare to a loss of 1.90 against nanoGPT's CPU settings", 4.0
    if result and "missing" in result:
        return row(what, f"≥ {aim:g} x", None, None, f"{NOT_MEASURED}: {result['missing']}")
    if not result:
        return speedup(what, None, aim)
    loss = max(result["recipe"]["loss"])
    reached = result["speed"]["median"] >= aim and loss <= result["goal"]
    return row(what, f"≥ {aim:g} x", f"{spread(result['speed'], ' x')}, loss {loss:.3f}", reached)


def tokens_row(folder: str | Path) -> Row:
    """The row of Muon's tokens: of all studies the one in which Muon needs the largest share of tokens."""
    what, aim = "the loss of nanoGPT's CPU settings: share of their tokens that Muon needs", 0.5
    found = {study["title"]: to_nanogpts_loss(study) for study in studies(folder)}
    if not found:
        return row(what, f"≤ {aim:.0%}", None, None)
    missed = [title for title, shares in found.items() if shares is None]
    if missed:
        return row(what, f"≤ {aim:.0%}", f"not reached: {', '.join(missed)}", False)
    share, time = max(found.values())
    return row(what, f"≤ {aim:.0%}", f"{share:.0%}, in {time:.0%} of their time", share <= aim)


def best_generation(result: dict | None) -> Summary | None:
    """The ratio to HF of batch 1 in bf16, of the compiled forward or the other, whichever is faster."""
    rows = result["rows"] if result else []
    found = [
        entry["speed"]
        for entry in rows
        if (entry["dtype"], entry["batch_size"]) == ("bfloat16", 1)
        and entry["name"].startswith("gpt2")
    ]
    return max(found, key=lambda speed: speed["median"], default=None)


def speeds(kind: str, folder: str | Path) -> str:
    """The figures of each contestant and part on one kind of device, empty if there are none."""
    sizes = {name: read_result(f"training-{name}", kind, folder) for name in ("gpt2", "baby")}
    shakespeare, parts = (read_result(name, kind, folder) for name in ("shakespeare", "parts"))
    sections = [training(size, result) for size, result in sizes.items() if result]
    if shakespeare and "missing" not in shakespeare:
        sections.append(race(shakespeare))
    if parts:
        sections.append(parts_table(parts))
    return "\n\n".join(sections)


def training(size: str, result: dict) -> str:
    """The contestants of one size."""
    shape = result["shape"]
    rows = [
        (
            name,
            ("bf16" if own["bf16"] else "fp32") + (", compiled" if own["compile"] else ""),
            spread(own["tokens_per_second"], digits=0),
            f"{own['memory'] / 2**30:.2f}",
        )
        for name, own in result["contestants"].items()
    ]
    ceiling = (
        f"; bf16 matmul {result['ceiling']['median'] / 1e12:.2f} TFLOP/s"
        if "ceiling" in result
        else ""
    )
    title = {"gpt2": "GPT-2 124M", "baby": "nanoGPT's CPU model"}[size]
    head = ("training", "", "tokens/s", "peak memory, GiB")
    return (
        f"{title}, {result['batch_size']} x {shape['n_positions']:,} tokens an update{ceiling}. "
        f"{describe_machine(result)}\n\n{markdown(head, rows)}"
    )


def race(result: dict) -> str:
    """Tiny Shakespeare."""
    names = {
        "recipe": "`recipes/shakespeare_fast.py`",
        "nanogpt": "nanoGPT's CPU settings, plain loop",
    }
    rows = [
        (title, spread(result[name]["time"], digits=1), f"{max(result[name]['loss']):.3f}")
        for name, title in names.items()
    ]
    head = ("tiny Shakespeare", "whole process, s", "loss over the validation split")
    return f"{describe_machine(result)}\n\n{markdown(head, rows)}"


def parts_table(result: dict) -> str:
    """What surrounds the updates."""
    preparation, checkpoint = result["preparation"], result["checkpoint"]
    if "missing" in preparation:
        prepared = f"{NOT_MEASURED}: {preparation['missing']}"
    else:
        prepared = (
            f"{preparation['speed']:.1f} MB/s with {preparation['workers']} workers; "
            f"tiktoken on one core {preparation['tiktoken']:.1f} MB/s"
        )
    rows = [
        ("`import gpt2_accel.train`", spread(result["import"], " s", 1)),
        ("a command to its first update, tiny model", spread(result["first_update"], " s", 1)),
        ("batches, 8 x 1,024 tokens", f"{result['loader']['median'] / 1e6:.1f}M tokens/s"),
        ("tokenizing text into shards, GPT-2's BPE", prepared),
        (
            "a checkpoint of 124M holds the loop up for",
            f"{spread(checkpoint['save'], ' s')}; a bare copy takes {spread(checkpoint['copy'], ' s')}",
        ),
    ]
    return f"{describe_machine(result)}\n\n{markdown(('part', 'measured'), rows)}"


def tokens(folder: str | Path) -> str:
    """The loss of each optimizer, schedule, batch and number of tokens."""
    found = studies(folder)
    if not found:
        return f"Optimizers and schedules: {NOT_MEASURED}."
    head = (*HEAD, *(study["title"] for study in found))
    return (
        f"The loss over the validation split at the best of the learning rates tried, and that rate. "
        f"{describe_machine(found[0])}\n\n{markdown(head, token_rows(folder))}"
    )


def ladder(folder: str | Path) -> str:
    """What `recipes/speed_ladder.py` left in `ladder/` of each kind of device, headings aside."""
    found = (Path(folder) / kind / "ladder" / "speed_ladder.md" for kind in ("cpu", "cuda"))
    texts = [path.read_text(encoding="utf-8").strip() for path in found if path.exists()]
    return "\n\n".join(text.lstrip("# ") for text in texts) or f"The ladder: {NOT_MEASURED}."


def generation(folder: str | Path) -> str:
    """Tokens per second of generation, a line for each dtype and batch."""
    found = (read_result("generate", kind, folder) for kind in ("cpu", "cuda"))
    return "\n\n".join(map(generation_table, filter(None, found))) or f"Generation: {NOT_MEASURED}."


def generation_table(result: dict) -> str:
    """Generation on one device."""
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
    return (
        f"{result['size']}, a prompt of {result['prompt_tokens']} tokens and {result['new_tokens']} "
        f"new ones, {result['rounds']} rounds: tokens/s, and the median of the rounds' ratios to HF. "
        f"{describe_machine(result)}\n\n{markdown(('dtype', 'batch', *names), rows)}"
    )


def describe_machine(result: dict) -> str:
    """The machine that a result is of, and when."""
    machine = result["machine"]
    threads = f", {machine['threads']} threads" if machine["type"] == "cpu" else ""
    return f"{machine['device']}{threads}, torch {machine['torch']}, {machine['date']}:"


def row(
    what: str, aim: str, measured: str | None, reached: bool | None, missing: str = NOT_MEASURED
) -> Row:
    """A row of the targets; `missing` stands for what is None."""
    return what, aim, measured or missing, "" if reached is None else "yes" if reached else "no"


def spread(found: Summary, unit: str = "", digits: int = 2) -> str:
    """Median and range, such as `2.31 x (2.25 to 2.40)`."""
    median, low, high = (f"{found[name]:,.{digits}f}" for name in ("median", "low", "high"))
    return f"{median}{unit} ({low} to {high})"


def percent(found: Summary, digits: int) -> str:
    """Median and range of shares, in per cent."""
    return spread({name: value * 100 for name, value in found.items()}, "%", digits)


def markdown(head: Row, rows: list[Row]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
