"""Studies by the real recipe: runs in child processes, kills, failures, tuning."""

import csv
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import LONG, long, refused, run
from filelock import FileLock, Timeout
from launching import ROOT, Started, in_process, wait_for

import gpt2_accel.train
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.runtime import device
from gpt2_accel.runtime.cores import usable_cpus
from gpt2_accel.runtime.files import read_json_lines
from gpt2_accel.tools.study import children
from gpt2_accel.tools.study.compare import Comparison, run_of, tuning_points, tuning_remarks
from gpt2_accel.tools.study.engine import LOG, require_scipy, set_aside
from gpt2_accel.tools.study.study_file import StudyFile, read_study
from gpt2_accel.tools.study.trials import CODE, read_table, read_trial

RECIPE = str(ROOT / "tests/train_script.py")
COMPARE = str(ROOT / "recipes/compare.py")
SMALL = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 32,
    "micro_batch_size": 4,
    "total_batch_size": 128,
    "warmup_share": 0.1,
    "eval_every": 10,
    "eval_tokens": 1024,
    "sample_every": 0,
    "save_every": 0,
}


def study_file(folder, data_dir, **parts):
    """Writes a study of two optimizers' rates; returns its path."""
    settings = SMALL | {"data_dir": str(data_dir)} | parts.pop("settings", {})
    content = {
        "recipe": RECIPE,
        "settings": settings,
        "variants": {"full": {"learning_rate": 1e-2}, "half": {"learning_rate": 5e-3}},
        "budget": {"tokens": 12 * 128},
        "seeds": 2,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content | parts))
    return path


def compare(path, folder, *options, fails=False):
    return in_process(COMPARE, path, "--output_dir", folder, *options, fails=fails)


def rows(folder):
    with open(folder / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))


def running(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def studied(data_dir, tmp_path_factory):
    """A study that is done: the result of its command, and its folder."""
    path = tmp_path_factory.mktemp("study")
    done = compare(study_file(path, data_dir), path / "out")
    return done, path / "out"


def test_a_halved_rate_of_adamw_is_worse(studied):
    done, folder = studied
    [row] = re.findall(r"^\| half .*$", done.stdout, re.MULTILINE)
    assert re.match(r"\| half +\| worse +\| \+\d\.\d+ ± 0\.\d+ +\|", row), row
    assert len(rows(folder)) == 4
    assert row in (folder / "study.md").read_text()


def test_a_run_is_the_training_loops(tiny, studied):
    """A recorded loss equals that of a run outside of the study; its metrics stay, its weights do not."""
    _, folder = studied
    settings = {name: value for name, value in SMALL.items() if name != "warmup_share"}
    own = {"learning_rate": 5e-3, "seed": 2, "max_steps": 12, "warmup_steps": 1}
    lines = run(tiny("run", **settings, **own))
    [row] = [row for row in rows(folder) if own.items() <= json.loads(row["settings"]).items()]
    assert float(row["loss"]) == pytest.approx(lines[-1]["val/loss"], rel=1e-6)
    kept = {path.name for path in (folder / f"runs/half-seed2-{row['id']}").iterdir()}
    assert {"metrics.jsonl", "config.yaml", "run.json", "log.txt"} <= kept
    assert not [name for name in kept if name.endswith(".safetensors") or "checkpoint" in name]


def test_a_recorded_study_trains_nothing(studied, data_dir, tmp_path):
    _, folder = studied
    copied = tmp_path / "elsewhere"  # the runs' folders are gone, the table is not
    copied.mkdir()
    table = (folder / "runs.csv").read_text()
    (copied / "runs.csv").write_text(table)
    done = compare(study_file(tmp_path, data_dir), copied)
    assert not (copied / "runs").exists()
    assert "other code" not in done.stdout
    assert (copied / "runs.csv").read_text() == table
    (copied / "runs.csv").write_text(table.replace(rows(copied)[0]["code"], "0" * 12))
    done = compare(study_file(tmp_path, data_dir), copied)
    assert "4 of 4 runs were recorded by other code than this" in done.stdout


def test_a_dry_run_says_what_is_left(studied, data_dir, tmp_path):
    _, folder = studied
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(folder / "runs.csv", out)
    done = compare(study_file(tmp_path, data_dir, seeds=3), out, "--dry_run", "true")
    cells = r" +\| half-seed3 +\| missing +\| [\d.]+k +\| 1.536k +\| 12 "
    assert re.search(cells, done.stdout), done.stderr
    assert "2 runs are not recorded: " in done.stdout
    assert [path.name for path in out.iterdir()] == ["runs.csv"]


@long
def test_a_killed_study_goes_on_to_the_same_table(data_dir, tmp_path):
    """Kills the driver or one of its trainers at random, 20 times in a long test. The trainers of a dead driver end within
    seconds."""
    wanted, updates = (20, 8000) if LONG else (2, 600)
    parts = {"settings": {"save_every": 50, "eval_every": 200}, "budget": {"tokens": updates * 128}}
    path, whole, out = study_file(tmp_path, data_dir, **parts), tmp_path / "whole", tmp_path / "out"
    compare(path, whole)
    draw, kills, starts = random.Random(1), [], 0
    while len(kills) < wanted:
        started = Started(COMPARE, path, "--output_dir", out, log=tmp_path / f"log{starts}")
        driver, starts = psutil.Process(started.pids[0]), starts + 1
        while started.poll() is None and len(kills) < wanted:
            time.sleep(draw.uniform(0.5, 5))
            if started.poll() is not None:  # the runs that were not killed are done
                break
            trainers = driver.children(recursive=True)
            victim = draw.choice([driver, *trainers])
            kills.append((victim == driver, draw.choice((signal.SIGKILL, signal.SIGTERM))))
            victim.send_signal(kills[-1][1])
            if victim == driver:
                started.wait()
                psutil.wait_procs(trainers, timeout=30)  # the fork server may still import
                assert not running(trainers)
        assert started.wait() or len(kills) == wanted, "the study ended before the kills"
    print(f"{len(kills)} kills, {sum(of for of, _ in kills)} of the driver, {starts} starts")
    compare(path, out)
    assert len(rows(out)) == 4
    assert (out / "runs.csv").read_bytes() == (whole / "runs.csv").read_bytes()


def test_a_trainer_ends_with_its_driver_while_it_imports(data_dir, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\nsys.path.insert(0, {!r})\nfrom train_script import *\n\n"
        "if '_CAPTURED' not in globals() and 'seed1' in ' '.join(sys.argv):\n    time.sleep(100)\n"
        "main()\n".format(str(ROOT / "tests"))
    )
    path, out = study_file(tmp_path, data_dir, recipe=str(slow)), tmp_path / "out"
    started = Started(COMPARE, path, "--output_dir", out, log=tmp_path / "log")
    wait_for(lambda: list(out.glob("runs/*/log.txt")))
    trainers = psutil.Process(started.pids[0]).children(recursive=True)
    started.send_signal(signal.SIGKILL)
    psutil.wait_procs(trainers, timeout=30)  # the fork server may still import
    assert trainers and not running(trainers)


def test_a_failed_run_is_named_and_a_diverged_one_is_recorded(data_dir, tmp_path):
    script = tmp_path / "recipe.py"
    script.write_text(
        "import sys\nsys.path.insert(0, {!r})\nfrom train_script import *\n\n"
        "if __name__ == '__main__':\n"
        "    config = parse_config(TrainConfig)\n"
        "    if config.seed == 2:\n        config.data_dir = 'nowhere'\n"
        "    cli.run(lambda: train(config))\n".format(str(ROOT / "tests"))
    )
    variants = {"good": {"learning_rate": 1e-2}, "wild": {"learning_rate": 1e30}}
    settings = {"max_grad_norm": 0.0}
    path = study_file(tmp_path, data_dir, recipe=str(script), variants=variants, settings=settings)
    done = compare(path, tmp_path / "out", fails=True)
    assert done.stderr.count(" failed: ") == 2 and "nowhere" in done.stderr
    assert "1 diverged, 1 missing" in done.stdout
    found = rows(tmp_path / "out")
    assert sorted(row["loss"] == "inf" for row in found) == [False, True]
    assert re.search(r"^\| wild +\| 1 of 1 diverged, 0 of 1 of the baseline: ", done.stdout, re.M)


FIXED = """import sys
sys.path.append({!r})
from train_script import *

TrainConfig.learning_rate_at = lambda self, *_: {}


if __name__ == "__main__":
    {}
    cli.run(main)
"""


def test_a_half_trained_run_whose_code_has_changed_starts_anew(data_dir, tmp_path, monkeypatch):
    """With comments only it goes on. At a rate of 0 the loss of a run that starts anew is always that of its first weights."""
    out = tmp_path / "out"

    def go_on(name, rate, comment):
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "recipe.py"
        script.write_text(FIXED.format(str(ROOT / "tests"), rate, comment))
        settings = {"eval_every": 4, "save_every": 8, "keep_best": False}
        parts = {"recipe": str(script), "variants": {"one": {}}, "settings": settings, "seeds": 1}
        done = compare(study_file(folder, data_dir, **parts), out, "--keep_models", "true")
        return done.stderr

    def kill_half_way():
        """Leaves what a kill after update 8 leaves."""
        [run] = out.glob("runs/*[0-9a-f]")
        for path in (out / "runs.csv", run / "status.json", run / "model.safetensors"):
            path.unlink()
        shutil.rmtree(run / "checkpoint-12")
        for path in run.glob("latest"):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        return run

    go_on("first", 0.01, "pass")
    [first], table = rows(out), (out / "runs.csv").read_bytes()
    run = kill_half_way()
    assert go_on("comments", 0.01, "'A docstring.'  # and a comment\n    pass") == ""
    assert "resumed from" in (run / LOG).read_text()
    assert (out / "runs.csv").read_bytes() == table
    kill_half_way()
    assert "has changed: it starts anew, the old run is in one-seed1-" in go_on("new", 0.0, "pass")
    [old] = out.glob("runs/*.old-*")
    assert (old / "checkpoint-8").is_dir() and not (run / "checkpoint-8").is_symlink()
    [second], lines = rows(out), read_json_lines(run / "metrics.jsonl")
    losses = {line["val/loss"] for line in lines if "val/loss" in line}
    assert losses == {float(second["loss"])} and float(second["loss"]) > float(first["loss"]) + 0.1
    assert second["code"] != first["code"] == (old / CODE).read_text()
    with FileLock(run / ".lock"), pytest.raises(Timeout):  # its process has not ended
        set_aside(run, first["code"])
    assert run.is_dir()


def test_children_that_are_killed(data_dir, tmp_path):
    with refused("the process that reads the recipe's settings was killed"):
        children.ask(os._exit, 1)
    script = tmp_path / "recipe.py"
    script.write_text(FIXED.format(str(ROOT / "tests"), "os.kill(os.getpid(), 9)", "pass"))
    path = study_file(tmp_path, data_dir, recipe=str(script), variants={"one": {}}, seeds=1)
    done = compare(path, tmp_path / "out", fails=True)
    assert "failed: killed by SIGKILL" in done.stderr


HEAD = "id,settings,parameters,updates,tokens,flops,loss,bits_per_byte,code\n"
ROW = 'a{},"{{""seed"": 1}}",1000,12,1536,2e6,10.648,4.5,0123456789ab\n'


@pytest.mark.parametrize(
    "damaged",
    [
        *(ROW.format(2)[:end] for end in (10, 42, 44, 50, -5, -1)),
        "<<<<<<< HEAD\n",
        ROW.format(2).replace("1000", "many"),
        ROW.format(2).replace("10.648", ""),
        ROW.format(2).replace("10.648", "nan"),
        ROW.format(2).replace(",0123456789ab", ""),
        ROW.format(2).replace("4.5", "4.5,1"),
        ROW.format(2).replace('""seed', '"seed'),
        ROW.format(2).replace("seed", "s\xe9ed"),
        ROW.format(1).replace("10.648", "1.0"),
    ],
)
@pytest.mark.parametrize("place", [2, 3])
def test_a_damaged_row_of_the_table_is_refused_by_its_line(damaged, place, tmp_path):
    table, good = tmp_path / "runs.csv", [ROW.format(1), ROW.format(3)]
    table.write_text(HEAD + "".join(good))
    assert [result.loss for result in read_table(table).values()] == [10.648] * 2
    end = good[1:] if damaged.endswith("\n") else []
    table.write_text(HEAD + "".join([good[0], "\n" * (place - 2), damaged, *end]), "latin-1")
    with refused(f"runs.csv, line {place + 1}: "):
        read_table(table)


def test_a_table_of_something_else_is_refused(tmp_path):
    table = tmp_path / "notes.csv"
    table.write_text("name,value\n")
    with refused("notes.csv, line 1: "):
        read_table(table)


def test_a_run_has_the_settings_that_its_recipe_takes_at_its_length(data_dir, monkeypatch, capsys):
    """The quickstart's decay depends on the number of passes over a little text: 1.6 from four on, below 0.3."""
    recipe, changes = ROOT / "recipes/quickstart.py", {"data_dir": str(data_dir)}
    tokens = read_manifest(data_dir)["splits"]["train"]["tokens"]
    short, long = (
        read_trial(recipe, changes | {"max_steps": passes * tokens // 2048}) for passes in (3, 5)
    )
    assert (short.resolved["weight_decay"], long.resolved["weight_decay"]) == (0.3, 1.6)
    assert read_trial(recipe, short.changes | {"weight_decay": 1.6}).id != short.id
    for name, value in {"argv": sys.argv, "path": [*sys.path]}.items():
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(gpt2_accel.train, "train", None)
    words = long.arguments(Path("runs/.settings"))
    found, _ = children.settings_of(recipe, recipe.read_bytes(), words)
    assert found["weight_decay"] == 1.6 and capsys.readouterr().out == ""


@long
def test_tuning_several_budgets_and_unequal_tokens(data_dir, tmp_path):
    parts = {
        "variants": {
            "adamw": {"optimizer": "adamw"},
            "muon": {"optimizer": "muon", "total_batch_size": 256},
        },
        "budget": {"tokens": [5 * 128, 12 * 128]},
        "tune": {"learning_rate": [5e-3, "1e-2"], "lr_schedule": ["cosine", "constant"]},
    }
    path = study_file(tmp_path, data_dir, **parts)
    done = compare(path, tmp_path / "out")
    assert "tokens: 640" in done.stdout and "tokens: 1.536k" in done.stdout
    assert "adamw: 4 trials chose learning_rate 0.01, lr_schedule constant" in done.stdout
    assert "adamw: the best learning_rate is at the end of its axis" in done.stdout
    assert re.search(r"muon reaches the loss of adamw with (<|>)? ?[\d.]+%", done.stdout)
    seeds = [json.loads(row["settings"])["seed"] for row in rows(tmp_path / "out")]
    assert seeds.count(0) == 8 and len(seeds) == 8 + 2 * 2 * 2


@pytest.mark.parametrize(
    "content, words",
    [
        ("recipe: quickstart\nvarints: {a: {}}", "unknown part 'varints'"),
        ("recipe: nonsense\nvariants: {a: {}}", "there is no recipe"),
        ("recipe: quickstart\nvariants: {}", "variants is empty"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {tokens: []}", "give numbers above 0"),
        ("recipe: quickstart\nvariants: {a: {seed: 3}}", "a sets seed, which the study sets"),
        ("recipe: quickstart\nvariants: {a: {}}\nmetric: b", "one of loss, bits_per_byte, got 'b'"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {minutes: 1}", "give tokens or flops"),
        (
            "recipe: quickstart\nvariants: {a: {}}\ntune: {trials: 3}",
            "trials is 3: give each setting a list",
        ),
        (
            "recipe: quickstart\nvariants: {a: {beta2: 0.9}}\ntune: {beta2: [0.8, 0.9]}",
            "a sets beta2, which tune also sets",
        ),
    ],
)
def test_bad_studies_are_refused_in_a_sentence(content, words, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(content)
    with refused(words):
        read_study(path, ROOT / "recipes")


@pytest.mark.parametrize(
    "own, words",
    [
        (
            {"tune": {"beta3": [0.9, 0.99]}},
            "variant a: .*unknown option --beta3: did you mean --beta",
        ),
        ({"tune": {"beta2": [0.9, 1.5]}}, "variant a: .*beta2 must be at least 0 and below 1"),
        ({"tune": {"warmup_steps": [1, 2]}}, "warmup_steps and warmup_share are both set"),
        ({"learning_rat": 1}, "variant a: .*learning_rat"),
        ({"n_head": 5}, "variant a: .*n_head"),
        ({"eval_every": 0}, "variant a: eval_every is 0"),
        ({"patience": 3}, "variant a: patience ends a run before its budget"),
        ({"warmup_share": "abc"}, "'abc': give a number from 0 to 1"),
        ({"beta2": {"x": 1}}, "variant a: beta2 cannot be"),
        ({"beta2": None}, "variant a: beta2 cannot be None"),
    ],
)
def test_settings_that_the_recipe_refuses_are_named_by_variant(own, words, data_dir, tmp_path):
    parts = own if "tune" in own else {}
    variants = {"a": {} if parts else own}
    path = study_file(tmp_path, data_dir, variants=variants, **parts)
    done = compare(path, tmp_path / "out", fails=True)
    assert "Traceback" not in done.stderr
    assert re.search(words, done.stderr.splitlines()[-1]), done.stderr
    assert not (tmp_path / "out").exists()


@long
def test_a_recipe_stays_as_it_was_read_and_its_helpers_are_in_a_runs_identity(data_dir, tmp_path):
    script, rates = tmp_path / "recipe.py", tmp_path / "rates.py"
    rates.write_text("RATE = 1e-3\n")
    text = (
        "import sys\nsys.path.append({!r})\nfrom train_script import *\nfrom rates import RATE\n\n"
        "if __name__ == '__main__':\n"
        "    config = parse_config(TrainConfig)\n"
        "    config.beta2 = 0.9\n"
        "    train.__globals__['learning_rate'] = lambda *_, **__: RATE\n"  # no setting
        "    cli.run(lambda: train(config))\n".format(str(ROOT / "tests"))
    )
    script.write_text(text)
    path = study_file(tmp_path, data_dir, recipe=str(script), variants={"one": {}}, seeds=3)
    out, log = tmp_path / "out", tmp_path / "log"
    started = Started(COMPARE, path, "--output_dir", out, "--processes", 1, log=log)
    wait_for(lambda: list(out.glob("runs/*/config.yaml")))
    script.write_text(text.replace("0.9", "0.8"))
    wait_for(lambda: len(list(out.glob("runs/*/config.yaml"))) > 1)
    rates.write_text("RATE = 1e-4\n")
    assert started.wait() == 1
    assert "rates.py has changed since the study started" in log.read_text()
    first = {row["id"] for row in rows(out)}
    assert 1 <= len(first) < 3
    for folder in out.glob("runs/*/config.yaml"):
        assert yaml.safe_load(folder.read_text())["beta2"] == 0.9
    script.write_text(text)
    compare(path, out)
    assert len(rows(out)) == len(first) + 3


def test_the_weights_of_init_from_are_in_a_runs_identity(tiny, data_dir, tmp_path):
    model = tmp_path / "model"
    settings = {"n_layer": 1, "n_embd": 16, "max_steps": 2}
    run(tiny(model, **settings, seed=1))
    changes = {"init_from": str(model), "data_dir": str(data_dir), "n_positions": 32}
    first = read_trial(Path(RECIPE), changes)
    assert read_trial(Path(RECIPE), changes).id == first.id
    moved = model.rename(tmp_path / "moved")
    assert read_trial(Path(RECIPE), changes | {"init_from": str(moved)}).id == first.id
    run(tiny(model, **settings, seed=2))
    assert read_trial(Path(RECIPE), changes).id != first.id


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with refused("a study needs scipy: pip install 'scipy"):
        require_scipy()


def outcome_of(study, values):
    """The outcome of a study by the losses of each variant and budget, NaN for a run that failed."""
    return Comparison(study, values, {at: at[1] for at in values})


def diverging(counts, seeds, budgets):
    """The outcome in which these numbers of each variant's runs diverged, first those of the baseline."""
    study = StudyFile("recipe", dict.fromkeys(map(str, range(len(counts)))), seeds=seeds)
    losses = [[math.inf] * count + [1.0] * (seeds - count) for count in counts]
    own = zip(study.variants, losses, strict=True)
    return outcome_of(study, {(name, at): of for name, of in own for at in range(budgets)})


FEW = "3 of 3 diverged, 0 of 3 of the baseline: too few seeds for a test"


@pytest.mark.parametrize(
    "counts, seeds, budgets, word",
    [
        ([0, 3], 3, 1, FEW),  # p = 2 / 20
        ([0, 4], 4, 1, "diverged more often"),  # p = 2 / 70
        ([4, 0], 4, 1, "diverged less often"),
        ([0, 4, 0], 4, 1, FEW.replace("3", "4")),  # 2 * 2 / 70
        ([0, 5, *[0] * 5], 5, 1, "diverged more often"),  # 6 * 2 / 252
        ([0, 5, *[0] * 6], 5, 1, FEW.replace("3", "5")),  # 7 * 2 / 252
        ([0, 5, 0, 0, 0], 5, 2, FEW.replace("3", "5")),  # 8 * 2 / 252
        ([0, 4, 5], 5, 1, "diverged more often"),  # Holm: 12 / 252 after 2 * 2 / 252
        ([0, 4, 4], 5, 1, "not distinguishable"),  # 2 * 12 / 252; one pair did not diverge
        ([3, 3], 3, 1, "no pair of runs"),
    ],
)
def test_a_variant_that_diverged_more_often(counts, seeds, budgets, word):
    """The p-values of Fisher's exact test are by hand."""
    found, _ = diverging(counts, seeds, budgets).verdict("1", 0)
    assert found.startswith(word)


@pytest.mark.parametrize("rate", [0.05, 0.1])
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("variants", [1, 2, 6])
def test_null_studies_rarely_find_that_a_variant_diverged_more_often(rate, seeds, variants):
    draw, found, studies = random.Random(0), 0, 300
    for _ in range(studies):
        counts = [sum(draw.random() < rate for _ in range(seeds)) for _ in range(variants + 1)]
        outcome = diverging(counts, seeds, 1)
        words = [outcome.verdict(str(place), 0)[0] for place in range(1, variants + 1)]
        found += any(word.startswith("diverged") for word in words)
    assert found <= 0.05 * studies


def test_a_run_that_failed_is_in_no_count_and_in_no_pair():
    own, base = [math.inf, 1.0, 1.1, 1.0, 1.0], [math.nan, 2.0, 2.05, math.inf, 2.0]
    losses = {("base", None): base, ("own", None): own}
    outcome = outcome_of(StudyFile("recipe", {"base": {}, "own": {}}), losses)
    assert outcome.diverged == {("base", None): (1, 3), ("own", None): (1, 4)}
    assert outcome.verdict("own", None)[0] == "better"


@pytest.mark.parametrize(
    "losses, expected",
    [
        ((5.0, 4.6, 4.4), "70.7%"),  # between two budgets
        ((5.0, 4.4, 4.6), "44.5%"),  # the first time
        ((4.4, 4.3, 4.2), "< 25%"),
        ((5.0, 5.1, 5.0), "> 100%"),
        ((5.0, math.inf, 4.5), "100.0%"),
    ],
)
def test_the_share_of_tokens_with_which_a_loss_is_reached(losses, expected):
    variants, budgets = {"base": (6.0, 5.5, 4.5), "own": losses}, (100, 200, 400)
    study = StudyFile("recipe", dict.fromkeys(variants), budget={"tokens": [*budgets]})
    own = {(name, at): [of[i]] * 2 for name, of in variants.items() for i, at in enumerate(budgets)}
    outcome = outcome_of(study, own)
    assert outcome.token_share("own").startswith(expected)
    assert outcome.token_share("base") is None


def test_a_best_value_at_the_end_of_its_axis_is_named():
    axes = ((0.0, 0.1), (0.9, 0.99), ("linear", "wsd"))
    names = ("weight_decay", "beta2", "lr_schedule")
    tried = [dict(zip(names, point, strict=True)) for point in itertools.product(*axes)]
    best = {"weight_decay": 0.0, "beta2": 0.99, "lr_schedule": "wsd"}
    chosen, end = tuning_remarks("one", best, tried)
    assert chosen == "one: 8 trials chose weight_decay 0.0, beta2 0.99, lr_schedule wsd"
    assert end == "one: the best beta2 is at the end of its axis: extend it"  # no decay below 0


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes/studies").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_shipped_studies_have_possible_settings(path, data_dir, tmp_path):
    study = read_study(path, ROOT / "recipes")
    study.settings["data_dir"] = str(data_dir)
    each = 7 if study.tune else 1
    assert len(tuning_points(study)) == each * len(study.variants)
    for name in study.variants:
        assert run_of(study, name, {}, 1, study.budgets[-1]).config.max_steps > 100


def test_one_slot_for_each_visible_gpu_or_core(monkeypatch):
    monkeypatch.setattr(device, "accelerator_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a, 5,MIG-7")
    assert children.slots(None) == ["GPU-1a", "5", "MIG-7"]
    assert len(children.slots(2)) == 2
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert len(children.slots(None)) == usable_cpus()
