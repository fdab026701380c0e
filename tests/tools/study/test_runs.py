"""Studies by the real recipe: runs in subprocesses, failures, kills, several drivers."""

import csv
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import long, run
from launching import ROOT, Started, python, wait_for
from tables import table

from gpt2_accel.data.shards import read_manifest
from gpt2_accel.tools.study.runs import read_trial

RECIPE = str(ROOT / "tests/train_script.py")
COMPARE = str(ROOT / "recipes/compare.py")
TABLE = table("tools/study/study")
STUDY = TABLE["study"]


SCRIPT = """import sys
{line}
sys.path.append({tests!r})
from train_script import *

if __name__ == "__main__":
    config = parse_config(TrainConfig)
    cli.run(lambda: train(config))
"""


def script(path, line=""):
    """Writes a recipe of the package's defaults with one more line at its start."""
    path.write_text(SCRIPT.format(line=line, tests=str(ROOT / "tests")))
    return str(path)


def study_file(folder, data_dir, settings=None, **parts):
    """Writes study.yaml with other parts and settings; returns its path."""
    content = {"recipe": RECIPE} | STUDY | parts
    content["settings"] = STUDY["settings"] | {"data_dir": str(data_dir)} | (settings or {})
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def compare(path, folder, *options, fails=False):
    return python(COMPARE, path, "--output_dir", folder, *options, fails=fails)


def rows(folder):
    if not (folder / "runs.csv").exists():
        return []
    with open(folder / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def studied(data_dir, tmp_path_factory):
    """A study of three variants, of which "wild" diverges and "lost" fails.

    The result of its command, its folder, and a function that writes a study without "lost".
    """
    path = tmp_path_factory.mktemp("study")
    recipe = script(path / "recipe.py", "if 'lost-seed1' in str(sys.argv): sys.exit('no luck')")
    wild = {"learning_rate": 1e30, "max_grad_norm": 0.0}
    variants = {"full": {"learning_rate": 1e-2}, "wild": wild}

    def write(folder, seeds=1, **added):
        parts = {"recipe": recipe, "variants": variants | added, "seeds": seeds}
        return study_file(folder, data_dir, **parts)

    file = write(path, lost={"learning_rate": 2e-2})
    return compare(file, path / "out", fails=True), path / "out", write


@long
def test_a_failed_run_is_named_and_a_diverged_one_is_recorded(studied):
    done, folder, _ = studied
    assert re.search(r"no luck\nexit code 1: .*/lost-seed1-", done.stderr)
    [row] = re.findall(r"^\| wild .*$", done.stdout, re.MULTILINE)
    assert "1 diverged, 0 of the baseline" in row
    assert row in (folder / "study.md").read_text()
    assert sorted(float(row["loss"]) for row in rows(folder))[1:] == [float("inf")]


@long
def test_a_run_of_a_study_equals_a_run_without_one(tiny, studied):
    """Its recorded loss is that of a run outside of the study. Its weights are not kept."""
    _, folder, _ = studied
    settings = STUDY["settings"].copy()
    del settings["warmup_share"]
    settings |= {"learning_rate": 1e-2, "seed": 1, "max_steps": 12, "warmup_steps": 1}
    lines = run(tiny("run", **settings))
    [run_dir] = folder.glob("runs/full-seed1-*")
    [row] = [row for row in rows(folder) if row["id"] in run_dir.name]
    assert float(row["loss"]) == pytest.approx(lines[-1]["val/loss"], rel=1e-6)
    kept = {path.name for path in run_dir.iterdir()}
    assert {"metrics.jsonl", "config.yaml", "run.json"} <= kept
    assert not [name for name in kept if name.endswith(".safetensors") or "checkpoint" in name]


@long
def test_a_recorded_study_trains_nothing_and_a_lost_table_is_written_from_its_runs(
    studied, tmp_path
):
    _, folder, write = studied
    path = write(tmp_path)
    copied = tmp_path / "elsewhere"  # the runs' folders are gone, the table is not
    copied.mkdir()
    recorded = (folder / "runs.csv").read_text()
    (copied / "runs.csv").write_text(recorded)
    assert "another version" not in compare(path, copied).stdout
    assert not (copied / "runs").exists()
    assert (copied / "runs.csv").read_text() == recorded
    (copied / "runs.csv").write_text(recorded.replace(rows(folder)[0]["code"], "0" * 12))
    assert "some runs were recorded by another version" in compare(path, copied).stdout
    shutil.copytree(folder / "runs", copied / "runs")
    (copied / "runs.csv").unlink()
    assert "exit code" not in compare(path, copied).stderr
    assert rows(copied) == rows(folder)


def test_the_id_of_a_run_follows_from_its_settings_and_weights(tiny, data_dir, tmp_path):
    """It follows from the settings that its recipe takes and the weights of `init_from`.

    The weight decay of the quickstart is 1.6 from four passes over a little text on.
    """
    model, moved = tmp_path / "model", tmp_path / "moved"
    shape = {"n_layer": 1, "n_embd": 16, "max_steps": 2}
    run(tiny(model, **shape, seed=1))
    shutil.copytree(model, moved)
    data = {"data_dir": str(data_dir)}
    tokens = read_manifest(data_dir)["splits"]["train"]["tokens"]
    changes = [data | {"max_steps": passes * tokens // 2048} for passes in (3, 5)]
    for folder in (model, moved):
        changes.append(data | {"n_positions": 32, "init_from": str(folder)})
    changes.append(changes[1] | {"weight_decay": 0.3})
    recipe = ROOT / "recipes/quickstart.py"
    trials = [read_trial(recipe, "one", each) for each in changes]
    assert [trial.config.weight_decay for trial in trials] == [0.3, 1.6, 0.3, 0.3, 0.3]
    ids = [trial.id for trial in trials]
    assert len(set(ids)) == 4
    assert ids[2] == ids[3]
    shutil.rmtree(model)
    run(tiny(model, **shape, seed=2))
    assert read_trial(recipe, "two", changes[2]).id != ids[2]


# Kills and several drivers


@long
def test_tuning_allows_several_budgets_and_unequal_tokens(data_dir, tmp_path):
    path = study_file(tmp_path, data_dir, **TABLE["several_budgets"])
    done = compare(path, tmp_path / "out")
    assert "tokens: 640" in done.stdout
    assert "tokens: 1,536" in done.stdout
    chosen = {"learning_rate": "1e-2", "lr_schedule": "constant"}
    assert f"adamw: 4 trials chose {chosen}" in done.stdout
    assert len(rows(tmp_path / "out")) == 8 + 2 * 2 * 2  # trials and runs


@pytest.fixture(scope="module")
def alone(data_dir, tmp_path_factory):
    """A study of three runs, so that one is the last, by one driver: its file and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    path = study_file(folder, data_dir, {"save_every": 50}, **TABLE["three_runs"])
    compare(path, folder / "out")
    return path, folder / "out"


def in_middle(driver, out):
    """Whether a driver trains a run that has a checkpoint."""
    for file in driver.open_files():
        if list(out.glob(f"runs/*-{Path(file.path).name[1:-5]}-*/checkpoint-*")):
            return True
    return False


@long
@pytest.mark.parametrize("how", ["together", "kill", "ctrl-c", "suspend"])
def test_two_drivers_write_the_table_of_one(how, alone, tmp_path):
    """The table is that of one driver, and no run begins twice."""
    path = alone[0]
    out = tmp_path / "out"
    command = (COMPARE, path, "--output_dir", out)
    both = [Started(*command, log=tmp_path / f"log{n}") for n in range(2)]
    drivers = [psutil.Process(started.pids[0]) for started in both]
    codes = [0, 0]
    if how != "together":
        wait_for(lambda: any(in_middle(driver, out) for driver in drivers), 120)
        hit = next(n for n, driver in enumerate(drivers) if in_middle(driver, out))
        if how == "suspend":
            drivers[hit].suspend()
            time.sleep(10)
            drivers[hit].resume()
        else:
            both[hit].send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
            codes[hit] = 130 if how == "ctrl-c" else -signal.SIGKILL
    assert [started.wait() for started in both] == codes, (tmp_path / "log0").read_text()
    assert (out / "runs.csv").read_bytes() == (alone[1] / "runs.csv").read_bytes()
    logs = [(tmp_path / f"log{number}").read_text() for number in range(2)]
    assert "".join(logs).count("updates 0 to") == 3
