"""Prints the benchmark results as tables, and writes them into docs/performance.md between its markers.

    python benchmarks/table.py

Reads `benchmarks/results`; missing results are marked as not measured. Copies the pictures of the results to `images/`
beside the page.
"""

import argparse
import shutil
from pathlib import Path

from results import RESULTS, read_result
from token_table import (
    architecture_rows,
    cases,
    final_rows,
    lever_rows,
    share_rows,
    share_text,
    token_share,
    width_rows,
)

PAGE = Path(__file__).parent.parent / "docs/performance.md"
NOT_MEASURED, NO_GPU = "not measured", "no GPU available"
Summary = dict[str, float]
Row = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    parser.add_argument("--page", default=PAGE, help="file with the markers")
    options = parser.parse_args()
    kinds = ("cpu", "cuda")
    sections = {
        "bench": "\n\n".join(
            filter(
                None, (targets(options.results), *(speeds(kind, options.results) for kind in kinds))
            )
        ),
        "bench tokens": tokens(options.results),
        "bench architectures": architectures(options.results),
        "bench generation": generation(options.results),
        "bench ladder": ladder(options.results),
        "bench gpu": gpu(options.results),
    }
    page = Path(options.page)
    text = page.read_text(encoding="utf-8")
    for name, section in sections.items():
        print(f"\n{section}")
        text = fill(text, name, section)
    page.write_text(text, encoding="utf-8")
    for name in ("ladder/speed_ladder.png", "learning_rates.png"):
        picture = Path(options.results) / "cpu" / name
        if picture.exists():
            (page.parent / "images").mkdir(exist_ok=True)
            shutil.copyfile(picture, page.parent / "images" / picture.name)


def fill(text: str, name: str, section: str) -> str:
    """Returns `text` with `section` between the markers of `name`. Raises `ValueError` if they are missing."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(
            f"the page needs the markers {begin} and {end}, once each: add them where the tables belong"
        )
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{section}\n\n{end}{rest.split(end)[1]}"


def targets(folder: str | Path) -> str:
    """Returns the table of targets and measurements."""
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
            gpt2, "… with `GPT2Config`'s default dropout", "HF Trainer, its dropout", 2.2, 0.6
        ),
        *against(gpt2, "124M on a CPU against a plain loop in fp32", "plain loop", 4.5, 0.55),
        share("124M on a CPU: share of the bf16 matmul ceiling", gpt2, 0.4),
        shakespeare_row(shakespeare),
        *token_targets(folder),
        overhead("124M", gpt2, 0.02),
        overhead("the baby's size", baby, 0.05),
        speedup(
            "generation, batch 1, bf16, against HF's `generate`", best_generation(generate), 1.5
        ),
        gpu_speed(read_result("training-alone", "cuda", folder)),
        share("124M on a GPU: share of the bf16 matmul ceiling", gpu, 0.5, NO_GPU),
        speedup(
            "124M on a GPU against HF's Trainer, compiled",
            gpu and gpu["speed"]["HF Trainer"],
            1.5,
            NO_GPU,
        ),
        speedup(
            "124M on a GPU against nanoGPT's loop", gpu and gpu["speed"]["plain loop"], 1.15, NO_GPU
        ),
    ]
    return markdown(("what", "aim", "measured", "reached"), rows)


def against(result: dict | None, what: str, other: str, speed: float, memory: float) -> list[Row]:
    """Returns the rows of speed and memory relative to another contestant."""
    share = result and result["memory"].get(other)
    return [
        speedup(what, result and result["speed"].get(other), speed),
        row(
            "… its memory", f"≤ {memory:g} x", share and f"{share:.2f} x", share and share <= memory
        ),
    ]


def speedup(what: str, found: Summary | None, aim: float, missing: str = NOT_MEASURED) -> Row:
    """Returns the row of a speedup with a target of at least `aim`."""
    return row(
        what,
        f"≥ {aim:g} x",
        found and spread(found, " x"),
        found and found["median"] >= aim,
        missing,
    )


def share(what: str, result: dict | None, aim: float, missing: str = NOT_MEASURED) -> Row:
    """Returns the row of an MFU with a target of at least `aim`."""
    found = result and result["mfu"]
    return row(
        what, f"≥ {aim:.0%}", found and percent(found, 0), found and found["median"] >= aim, missing
    )


def gpu_speed(result: dict | None) -> Row:
    """Returns the row of the speed on a GPU; the target is for an H100."""
    what, aim = "124M on one H100: tokens/s", 430_000
    if not result:
        return row(what, f"≥ {aim:,}", None, None, NO_GPU)
    found = result["contestants"]["gpt2_accel"]["tokens_per_second"]
    reached = found["median"] >= aim if "H100" in result["machine"]["device"] else None
    return row(what, f"≥ {aim:,}", spread(found, digits=0), reached)


def overhead(size: str, result: dict | None, aim: float) -> Row:
    """Returns the row of the loop's overhead over a bare loop, with a target of at most `aim`."""
    found = result and result["overhead"]
    what = f"the whole loop over a bare one with the same kernels, {size}"
    return row(what, f"≤ {aim:.0%}", found and percent(found, 1), found and found["median"] <= aim)


def shakespeare_row(result: dict | None) -> Row:
    """Returns the row of tiny Shakespeare."""
    what, aim = "tiny Shakespeare to a loss of 1.90 against nanoGPT's CPU settings", 4.0
    if result and "missing" in result:
        return row(what, f"≥ {aim:g} x", None, None, f"{NOT_MEASURED}: {result['missing']}")
    if not result:
        return speedup(what, None, aim)
    loss = max(result["recipe"]["loss"])
    reached = result["speed"]["median"] >= aim and loss <= result["goal"]
    return row(what, f"≥ {aim:g} x", f"{spread(result['speed'], ' x')}, loss {loss:.3f}", reached)


def token_targets(folder: str | Path) -> list[Row]:
    """Returns the rows of the shares of tokens that Muon needs: the largest share of all cases."""
    result = read_result("token_value", "cpu", folder)
    rows = []
    for baseline, what, aim in (
        ("nanoGPT", "Muon's tokens to the loss of nanoGPT's CPU settings", 0.36),
        ("AdamW", "Muon's tokens to the loss of AdamW, tuned with an equal budget", 0.75),
    ):
        measured, reached = None, None
        if result:
            worst = max(cases(result).values(), key=lambda found: token_share(found, baseline))
            measured = f"{share_text(worst, baseline)} of its tokens"
            reached = token_share(worst, baseline)[0] <= aim
        rows.append(row(what, f"≤ {aim:.0%}", measured, reached))
    return rows


def best_generation(result: dict | None) -> Summary | None:
    """Returns the speedup over HF for batch 1 in bf16, compiled or not, whichever is faster."""
    rows = result["rows"] if result else []
    found = [
        entry["speed"]
        for entry in rows
        if (entry["dtype"], entry["batch_size"]) == ("bfloat16", 1)
        and entry["name"].startswith("gpt2")
    ]
    return max(found, key=lambda speed: speed["median"], default=None)


def speeds(kind: str, folder: str | Path) -> str:
    """Returns the tables of all contestants and parts on one kind of device; empty without results."""
    sizes = {name: read_result(f"training-{name}", kind, folder) for name in ("gpt2", "baby")}
    shakespeare, parts = (read_result(name, kind, folder) for name in ("shakespeare", "parts"))
    sections = [training(size, result) for size, result in sizes.items() if result]
    if shakespeare and "missing" not in shakespeare:
        sections.append(race(shakespeare))
    if parts:
        sections.append(parts_table(parts))
    return "\n\n".join(sections)


def training(size: str, result: dict) -> str:
    """Returns the table of the contestants of one size."""
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
    titles = {"baby": "nanoGPT's CPU model", "qwen3": "GPT-2 124M and a Qwen3 of its size"}
    title = titles.get(size, "GPT-2 124M")
    head = ("training", "", "tokens/s", "peak memory, GiB")
    return (
        f"{title}, {result['batch_size']} x {shape['n_positions']:,} tokens an update{ceiling}. "
        f"{describe_machine(result)}\n\n{markdown(head, rows)}"
    )


def race(result: dict) -> str:
    """Returns the table of tiny Shakespeare."""
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
    """Returns the table of `parts.py`."""
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
            "a checkpoint of 124M blocks the loop for",
            f"{spread(checkpoint['save'], ' s')}; a bare copy takes {spread(checkpoint['copy'], ' s')}",
        ),
    ]
    return f"{describe_machine(result)}\n\n{markdown(('part', 'measured'), rows)}"


def tokens(folder: str | Path) -> str:
    """Returns the tables of the token study."""
    result = read_result("token_value", "cpu", folder)
    if not result:
        return f"AdamW and Muon: {NOT_MEASURED}."
    seeds = len(result["finals"][0]["losses"])
    trials = " or ".join(str(n) for n in sorted({entry["trials"] for entry in result["screening"]}))
    tables = (
        (
            f"The loss in nats per token at the end: mean of {seeds} seeds ± half the width of the 95% interval. "
            f"Each optimizer tried {trials} settings on each corpus.",
            ("case", "", "tokens", "loss", "settings"),
            final_rows(result),
        ),
        (
            "Muon's tokens to a contestant's loss, as a share of that contestant's tokens, with the same interval.",
            ("case", "nanoGPT's settings", "AdamW"),
            share_rows(result),
        ),
        (
            "One setting of Muon changed, at the smaller size: how far the loss rises (+) or falls (-).",
            ("setting", "corpus", "used", "other", "other's loss - used one's"),
            lever_rows(result),
        ),
        (
            "The loss by width and peak learning rate, one seed.",
            *width_rows(result),
        ),
    )
    text = "\n\n".join(f"{title}\n\n{markdown(head, rows)}" for title, head, rows in tables)
    return f"{describe_machine(result)}\n\n{text}"


def architectures(folder: str | Path) -> str:
    """Returns the tables of Qwen3: its speed and memory, and the models from GPT-2 to it."""
    study, speed = (
        read_result(name, "cpu", folder) for name in ("architectures", "training-qwen3")
    )
    sections = []
    if study:
        head = ("corpus", "model", "parameters", "learning rate", "loss, equal tokens")
        head += ("change to the row above", "ms an update", "loss, equal time")
        rows = architecture_rows(study)
        sections.append(f"{describe_machine(study)}\n\n{markdown(head, rows)}")
    else:
        sections.append(f"From GPT-2 to Qwen3: {NOT_MEASURED}.")
    if speed:
        rows = [
            (title, spread(speed["speed"][name], " x"), f"{speed['memory'][name]:.2f} x")
            for name, title in {
                "HF Trainer, Qwen3": "HF Trainer",
                "gpt2_accel": "GPT-2 here",
            }.items()
        ]
        head = ("Qwen3 here against", "tokens/s", "peak memory")
        sections += [training("qwen3", speed), markdown(head, rows)]
    else:
        sections.append(f"The speed of Qwen3: {NOT_MEASURED}.")
    return "\n\n".join(sections)


def ladder(folder: str | Path) -> str:
    """Returns the speed ladder's tables of all kinds of device, from `ladder/` in the results."""
    found = (Path(folder) / kind / "ladder" / "speed_ladder.md" for kind in ("cpu", "cuda"))
    texts = [path.read_text(encoding="utf-8").strip() for path in found if path.exists()]
    return "\n\n".join(text.lstrip("# ") for text in texts) or f"The ladder: {NOT_MEASURED}."


def generation(folder: str | Path) -> str:
    """Returns the tables of generation of all kinds of device."""
    found = (read_result("generate", kind, folder) for kind in ("cpu", "cuda"))
    return "\n\n".join(map(generation_table, filter(None, found))) or f"Generation: {NOT_MEASURED}."


def generation_table(result: dict) -> str:
    """Returns the table of generation on one device, with a row per dtype and batch."""
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


def gpu(folder: str | Path) -> str:
    """Returns the tables of `make gpu` on a GPU."""
    names = ("gpu", "training-alone", "training-switches", "kernels", "profile")
    found = {name: read_result(name, "cuda", folder) for name in names}
    tables = {
        "gpu": gpu_steps,
        "training-alone": lambda result: training("alone", result),
        "training-switches": lambda result: training("switches", result),
        "kernels": kernels_table,
        "profile": profile_table,
    }
    sections = [tables[name](result) for name, result in found.items() if result]
    return "\n\n".join(sections) or f"`make gpu`: {NOT_MEASURED}, {NO_GPU}."


def gpu_steps(result: dict) -> str:
    """Returns the table of the steps of `make gpu` and their outcomes."""
    rows = [
        (part, name, step["outcome"], f"{step['seconds']:.0f}")
        for part, each in result["parts"].items()
        for name, step in each.items()
    ]
    return f"{describe_machine(result)}\n\n{markdown(('part', 'step', 'outcome', 's'), rows)}"


def kernels_table(result: dict) -> str:
    """Returns the table of `kernels.py`."""
    rows = [
        (
            part,
            name,
            found.get("problem") or spread(found["milliseconds"], digits=2),
            f"{found['memory'] / 2**30:.2f}" if "memory" in found else "",
        )
        for part in ("loss", "attention")
        for name, found in result[part].items()
    ]
    sizes = "{rows:,} rows of {width}, vocabulary {vocab:,}".format(**result["size"])
    shape = ", ".join(map(str, result["shape"]))
    head = ("forward and backward", "", "ms", "peak memory, GiB")
    return (
        f"The head with its loss, {sizes}; causal attention, B, H, T, D = {shape}. "
        f"{describe_machine(result)}\n\n{markdown(head, rows)}"
    )


def profile_table(result: dict) -> str:
    """Returns the table of `profile_updates.py`."""
    rows = [
        (
            f"`{operation['name'][:80]}`",
            f"{operation['milliseconds']:.2f}",
            f"{operation['share']:.1%}",
            f"{operation['calls']:,.0f}",
        )
        for operation in result["operations"]
    ]
    head = (f"{result['kind']}", "ms an update", "share", "calls an update")
    return (
        f"The operations that take longest, of {result['milliseconds']:.1f} ms an update of 2 x "
        f"{result['batch_size']} sequences. {describe_machine(result)}\n\n{markdown(head, rows)}"
    )


def describe_machine(result: dict) -> str:
    """Describes the machine and the date of a result."""
    machine = result["machine"]
    threads = ""
    if machine["type"] == "cpu":
        threads = f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return f"{machine['device']}{threads}, torch {machine['torch']}, {machine['date']}:"


def row(
    what: str, aim: str, measured: str | None, reached: bool | None, missing: str = NOT_MEASURED
) -> Row:
    """Returns a row of the targets; `missing` replaces a measurement that is None."""
    return what, aim, measured or missing, "" if reached is None else "yes" if reached else "no"


def spread(found: Summary, unit: str = "", digits: int = 2) -> str:
    """Formats median and range, such as `2.31 x (2.25 to 2.40)`; a single run has no range."""
    median, low, high = (f"{found[name]:,.{digits}f}" for name in ("median", "low", "high"))
    if found["low"] == found["high"]:
        return f"{median}{unit}, one run"
    return f"{median}{unit} ({low} to {high})"


def percent(found: Summary, digits: int) -> str:
    """Formats median and range of shares in per cent."""
    return spread({name: value * 100 for name, value in found.items()}, "%", digits)


def markdown(head: Row, rows: list[Row]) -> str:
    """Formats a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
