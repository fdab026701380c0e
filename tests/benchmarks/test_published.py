"""What the pages say follows from the recorded results."""

import re
import sys

import pytest
from launching import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import published
from results import RESULTS, ratios, read_results

README = (ROOT / "README.md").read_text()
PAGES = {
    "scaling": "scaling",
    "rates": "scaling",
    "optimizers": "results",
    "architectures": "results",
}
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e\d+)?")


@pytest.mark.parametrize("section", PAGES)
def test_every_figure_of_a_published_table_follows_from_the_recorded_runs(section):
    page = (ROOT / f"docs/{PAGES[section]}.md").read_text()
    shown = page.split(f"<!-- bench {section} -->")[1].split(f"<!-- /bench {section}")[0].strip()
    found = published.STUDIES[section](RESULTS)
    assert NUMBER.sub("", shown) == NUMBER.sub("", found)
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (shown, found)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=0.0011)


@pytest.mark.parametrize(
    "corpus, place, other, lower",
    [
        ("Python's library", 1, ("adamw", 0.002, 192, "wsd", 0.1, 0.0, 0.9998, 0.1), 2),
        ("tiny Shakespeare", 2, ("muon", 0.011, 384, "linear", 0.03, 0.03, 0.95, 0.001), 3),
    ],
)
def test_settings_that_were_not_taken_differ_as_the_page_says(corpus, place, other, lower):
    taken = published.OPTIMIZERS[corpus]
    runs = published.read_runs(RESULTS / "cpu" / taken[0])
    first, second = (published.losses_of(runs, settings) for settings in (taken[place], other))
    differences = {tokens: second[tokens] - first[tokens] for tokens in first}
    page = (ROOT / "docs/results.md").read_text()
    assert f"{published.plus_minus(differences[768_000], '+.4f')} at 768,000 tokens" in page
    assert sum(each.mean() < 0 for each in differences.values()) == lower


@pytest.mark.parametrize("name", ["gpt2", "baby", "qwen3"])
def test_a_ratio_follows_from_the_seconds_beside_it(name):
    [result] = read_results(name)
    first, *others = result["rows"]
    for row in others:
        assert row["speed_up"] == pytest.approx(ratios(row["seconds"], first["seconds"]))
        assert row["memory_ratio"] == pytest.approx(first["memory"] / row["memory"])


def values(name: str, column: str, *names: str) -> list[str]:
    """Returns the figures of a column of a result on a CPU in the README's form, of rows by the start of name and setting."""
    rows = {f"{row['name']}, {row['setting']}": row for row in read_results(name)[0]["rows"]}
    found = [row[column] for start in names for key, row in rows.items() if key.startswith(start)]
    return [f"{value['median'] if isinstance(value, dict) else value:.2f}" for value in found]


def test_the_figures_of_the_readme_are_recorded():
    others = ("nanoGPT's loop", "HF Trainer")
    expected = {
        "speed-up over it: 124M on a CPU": values("gpt2", "speed_up", *others),
        "peak memory relative to it: 124M on a CPU": values("gpt2", "memory_ratio", *others),
        "speed-up over it: nanoGPT's CPU model": values("baby", "speed_up", *others),
        "speed-up of another recipe": values("shakespeare", "speed_up", others[0]),
        "speed-up over it: one sample": values("generate", "speed_up", "HF generate, bf16")[:1],
    }
    for head, found in expected.items():
        [line] = re.findall(rf"^\| {head}.*$", README, re.MULTILINE)
        assert re.findall(r"(\d\.\d\d) x", line) == found, line
    rate = read_results("gpt2")[0]["rows"][0]["matmul_flops"]["median"]
    assert f"here {rate / 1e12:.2f} TFLOP/s" in README
    [quickstart] = read_results("quickstart")
    line = "val/loss {val/loss:.4f} ± {val/loss_stderr:.4f}, val/perplexity {val/perplexity:.4f}, "
    assert (line + "val/bits_per_byte {val/bits_per_byte:.4f}").format(**quickstart) in README
    assert f"`xz -9` needs {quickstart['xz -9']:.3f} bits per byte" in README
    assert f"to {quickstart['val/bits_per_byte']:.2f} bits per byte" in README
