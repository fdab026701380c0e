"""The published studies: what the pages say follows from the recorded runs."""

import json
import re
import statistics

import pytest
from launching import ROOT

RESULTS = ROOT / "benchmarks/results"
PAGES = {"scaling": "scaling", "rates": "scaling", "optimizers": "studies/optimizers"}
ROWS = ("loss of 2 layers of 160", "predicted before the run")
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e\d+)?")


@pytest.mark.parametrize("section", PAGES)
def test_every_figure_of_a_published_table_follows_from_the_recorded_runs(section, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published

    page = (ROOT / f"docs/{PAGES[section]}.md").read_text()
    shown = (
        page.split(f"<!-- bench {section} -->")[1].split(f"<!-- /bench {section} -->")[0].strip()
    )
    found = getattr(published, section)(RESULTS)
    assert NUMBER.sub("", shown) == NUMBER.sub("", found)
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (shown, found)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=0.0011)


def test_the_predictions_are_those_that_were_written_before_the_runs(monkeypatch):
    """Those of the laws' files of that day equal the first lines of best-*.yaml; today's fit gives the same losses."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published

    table = published.scaling(RESULTS)
    today, before = (re.search(rf"^\| {row} \|(.*)", table, re.M)[1].split("|") for row in ROWS)
    for place, target in enumerate(("1e14", "2e14")):
        path = RESULTS / f"cpu/scaling/best-{target}.yaml"
        written = [float(number) for number in re.findall(r"\d\.\d{4}\b", path.read_text())[:3]]
        assert [float(n) for n in re.findall(r"\d\.\d+", before[place])] == pytest.approx(
            written, abs=1e-3
        )
        assert float(today[place].split()[0]) == pytest.approx(written[0], abs=1e-3)


@pytest.mark.parametrize("size", ["gpt2", "baby", "qwen3"])
def test_a_trainer_s_ratio_follows_from_the_seconds_beside_it(size):
    result = json.loads((RESULTS / f"cpu/training-{size}.json").read_text())
    for name, ratio in result["speed"].items():
        beside = "gpt2_accel, Qwen3" if size == "qwen3" else "gpt2_accel"
        own = result["contestants"][beside]["seconds"]
        own = result.get("own_seconds", {}).get(name, own)
        rival = result["contestants"][name]["seconds"]
        pairs = [a / b for a, b in zip(rival, own, strict=True)]
        assert ratio["median"] == pytest.approx(statistics.median(pairs))
        assert [ratio["low"], ratio["high"]] == pytest.approx([min(pairs), max(pairs)])
