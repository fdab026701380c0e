"""Studies by the real recipe: grids of runs in child processes, kills, failures, several processes."""

import csv
import json
import math
import random
import re
import signal
import time
from dataclasses import replace

import psutil
import pytest
import yaml
from conftest import LONG, run, tiny_config
from launching import ROOT, Started, python

from gpt2_accel.cores import usable_cpus
from gpt2_accel.study.children import slots
from gpt2_accel.study.compare import (
    Comparison,
    Variant,
    check_on_axes,
    first_trial,
    read_study,
    with_budget,
)
from gpt2_accel.study.table import Result

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


def compare(path, folder, *options):
    return python(COMPARE, path, "--output_dir", folder, *options)


def rows(folder):
    with open(folder / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def studied(data_dir, tmp_path_factory):
    """A study that is done: the result of its command, and its folder."""
    path = tmp_path_factory.mktemp("study")
    done = compare(study_file(path, data_dir), path / "out")
    assert done.returncode == 0, done.stderr
    return done, path / "out"


def test_a_halved_rate_of_adamw_is_worse(studied):
    done, folder = studied
    [row] = re.findall(r"^\| half .*$", done.stdout, re.MULTILINE)
    assert re.match(r"\| half +\| worse +\| \+\d\.\d+ ± 0\.\d+ +\|", row), row
    assert len(rows(folder)) == 4
    assert "standard deviation" in done.stdout
    page = (folder / "study.html").read_text()
    assert "worse" in page and "<svg" in page and (folder / "curves.png").exists()


def test_a_run_is_the_training_loops(studied, data_dir, tmp_path):
    """A recorded loss equals that of a run outside of the study; its metrics stay, its weights do not."""
    _, folder = studied
    settings = {name: value for name, value in SMALL.items() if name != "warmup_share"}
    own = {"learning_rate": 5e-3, "seed": 2, "max_steps": 12, "warmup_steps": 1}
    lines = run(tiny_config(data_dir, tmp_path / "run", **settings, **own))
    [row] = [row for row in rows(folder) if own.items() <= json.loads(row["settings"]).items()]
    assert float(row["loss"]) == pytest.approx(lines[-1]["val/loss"], rel=1e-6)
    kept = {path.name for path in (folder / "runs" / row["id"]).iterdir()}
    assert {"metrics.jsonl", "config.yaml", "run.json", "log.txt", "result.json"} <= kept
    assert not [name for name in kept if name.endswith(".safetensors") or "checkpoint" in name]


def test_a_recorded_study_trains_nothing_and_its_last_lines_are_autoresearchs(
    studied, data_dir, tmp_path
):
    _, folder = studied
    copied = tmp_path / "elsewhere"  # the runs' folders are gone, the table is not
    copied.mkdir()
    (copied / "runs.csv").write_bytes((folder / "runs.csv").read_bytes())
    done = compare(study_file(tmp_path, data_dir), copied)
    assert done.returncode == 0 and not (copied / "runs").exists(), done.stderr
    assert "other code" not in done.stdout
    assert (copied / "runs.csv").read_bytes() == (folder / "runs.csv").read_bytes()
    _, lines = done.stdout.rsplit("---\n", 1)
    values = dict(re.findall(r"^(\w+):\s+(\S+)$", lines, re.MULTILINE))
    losses = [
        float(r["bits_per_byte"]) for r in rows(folder) if '"learning_rate": 0.005' in r["settings"]
    ]
    assert float(values["val_bpb"]) == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert values["num_steps"] == "12" and values["depth"] == "1"
    assert values["training_seconds"] == "nan"  # was in the folders
    table = (copied / "runs.csv").read_text()
    code = rows(copied)[0]["code"]
    (copied / "runs.csv").write_text(table.replace(code, "0" * 12))
    done = compare(study_file(tmp_path, data_dir), copied)
    assert "4 of 4 runs were recorded by other code than this" in done.stdout
    assert list(values) == [
        "val_bpb",
        "training_seconds",
        "total_seconds",
        "peak_vram_mb",
        "mfu_percent",
        "total_tokens_M",
        "num_steps",
        "num_params_M",
        "depth",
    ]


def test_a_killed_study_goes_on_and_its_children_end_with_it(studied, data_dir, tmp_path):
    """Kills the study at random; in the end its table equals that of an undisturbed one."""
    _, folder = studied
    path, out = study_file(tmp_path, data_dir, settings={"save_every": 3}), tmp_path / "out"
    draw, kills = random.Random(1), 10 if LONG else 2
    for kill in range(kills):
        started = Started(COMPARE, path, "--output_dir", out, log=tmp_path / f"log{kill}")
        time.sleep(draw.uniform(0.5, 5))
        children = (
            psutil.Process(started.pids[0]).children(recursive=True)
            if started.poll() is None
            else []
        )
        started.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM)))
        started.wait()
        psutil.wait_procs(children, timeout=30)
        assert not [
            child
            for child in children
            if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        ]
    done = compare(path, out)
    assert done.returncode == 0, done.stderr
    assert (out / "runs.csv").read_bytes() == (folder / "runs.csv").read_bytes()


def test_two_processes_share_a_study(studied, data_dir, tmp_path):
    _, folder = studied
    path, out = study_file(tmp_path, data_dir), tmp_path / "out"
    both = [
        Started(COMPARE, path, "--output_dir", out, "--processes", 1, log=tmp_path / f"log{n}")
        for n in range(2)
    ]
    assert [started.wait() for started in both] == [0, 0], (tmp_path / "log0").read_text()
    assert (out / "runs.csv").read_bytes() == (folder / "runs.csv").read_bytes()
    # No run was trained twice.
    for log in (out / "runs").glob("*/log.txt"):
        assert log.read_text().count("updates 0 to 12") == 1


def test_a_run_that_another_process_took_is_stopped_and_not_recorded(data_dir, tmp_path):
    path = study_file(
        tmp_path, data_dir, variants={"one": {}}, seeds=1, budget={"tokens": 128 * 100_000}
    )
    out, log = tmp_path / "out", tmp_path / "log"
    started = Started(COMPARE, path, "--output_dir", out, log=log)
    wait_until(lambda: list(out.glob("runs/*/metrics.jsonl")))
    [first] = out.glob("runs/*/claim-1")
    first.with_name("claim-2").write_text("process 1 on elsewhere")
    wait_until(lambda: "was taken by process 1 on elsewhere" in log.read_text())
    assert json.loads((first.parent / "status.json").read_text())["state"] == "stopped"
    started.send_signal(signal.SIGTERM)
    assert started.wait() == 130
    assert not (first.parent / "result.json").exists() and not (out / "runs.csv").exists()


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_part_measures_no_speed_of_its_own(data_dir, tmp_path):
    path = study_file(tmp_path, data_dir, budget={"minutes": 0.01})
    done = compare(path, tmp_path / "out", "--part", "0/2")
    assert done.returncode == 1 and "whose speed each machine would" in done.stderr


def test_parts_divide_a_study_without_a_shared_disk(studied, data_dir, tmp_path):
    _, folder = studied
    path = study_file(tmp_path, data_dir)
    for number in range(2):
        done = compare(path, tmp_path / f"part{number}", "--part", f"{number}/2")
        assert done.returncode == 0, done.stderr
    together = tmp_path / "together"
    together.mkdir()
    counts = []
    for number in range(2):
        name = f"runs-{number}-of-2.csv"
        text = (tmp_path / f"part{number}" / name).read_text()
        counts.append(text.count("\n") - 1)
        (together / name).write_text(text)
    assert counts == [2, 2]
    done = compare(path, together)
    assert done.returncode == 0 and not (together / "runs").exists(), done.stderr
    assert (together / "runs.csv").read_bytes() == (folder / "runs.csv").read_bytes()


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
    done = compare(path, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count(" failed: ") == 2 and "nowhere" in done.stderr
    assert "1 diverged, 1 missing" in done.stdout
    found = rows(tmp_path / "out")
    assert sorted(row["loss"] == "inf" for row in found) == [False, True]
    assert re.search(r"^\| wild +\| diverged more often ", done.stdout, re.MULTILINE)


def test_tuning_and_several_budgets(data_dir, tmp_path):
    parts = {
        "variants": {
            "adamw": {"learning_rate": 5e-3},
            "muon": {"optimizer": "muon", "learning_rate": 5e-3},
        },
        "budget": {"tokens": [6 * 128, 12 * 128]},
        "seeds": 2,
        "tune": {"trials": 3, "axes": {"learning_rate": [2.5e-3, 5e-3, 1e-2]}},
    }
    path = study_file(tmp_path, data_dir, **parts)
    done = compare(path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "tokens: 768" in done.stdout and "tokens: 1.536k" in done.stdout
    assert "adamw: 3 trials chose learning_rate 0.01" in done.stdout
    assert "adamw: the best learning_rate is at the end of its axis" in done.stdout
    assert re.search(r"muon reaches the loss of adamw with (<|>)? ?[\d.]+%", done.stdout)
    seeds = [json.loads(row["settings"])["seed"] for row in rows(tmp_path / "out")]
    assert seeds.count(0) == 6 and len(seeds) == 6 + 2 * 2 * 2


def test_minutes_are_measured_once_and_stored(data_dir, tmp_path):
    path = study_file(tmp_path, data_dir, budget={"minutes": 0.01}, seeds=1, variants={"one": {}})
    for _ in range(2):
        done = compare(path, tmp_path / "out", "--processes", 1)
        assert done.returncode == 0, done.stderr
    [speed] = json.loads((tmp_path / "out/runs-speeds.json").read_text()).values()
    [row] = rows(tmp_path / "out")
    assert int(row["updates"]) == max(1, round(speed * 0.6 / 128))


@pytest.mark.parametrize(
    "content, words",
    [
        ("recipe: quickstart\nvarints: {a: {}}", "unknown part 'varints'"),
        ("recipe: nonsense\nvariants: {a: {}}", "there is no recipe"),
        ("variants: {a: {}}", "recipe is None, expected a text"),
        ("recipe: quickstart\nvariants: {}", "variants is empty"),
        ("recipe: quickstart\nvariants: {a: {seed: 3}}", "a sets seed, which the study sets"),
        ("recipe: quickstart\nvariants: {a: {}}\nbaseline: b", "baseline 'b' is none of"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {tokens: -1}", "give numbers above 0"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {hours: 1}", "give one of tokens, flops"),
        ("recipe: quickstart\nvariants: {a: {}}\nseeds: 0", "seeds must be at least 1"),
        ("recipe: quickstart\nvariants: {a: {}}\nmetric: accuracy", "metric must be one of"),
        ("recipe: quickstart\nvariants: {a: {}}\ntune: {trials: 3}", "tune has axes"),
        (
            "recipe: quickstart\nvariants: {a: {}}\ntune: {axes: {beta2: [0.9, 0.99]}}",
            "either trials, at least 2, or until_no_step_helps",
        ),
        (
            "recipe: quickstart\nvariants: {a: {}}\ntune: {trials: 3, axes: {beta3: [0.9, 0.99]}}",
            "unknown setting 'beta3'",
        ),
        (f"recipe: {RECIPE}\nvariants: {{a: {{learning_rat: 1}}}}", "variant a: .*learning_rat"),
        (
            f"recipe: {RECIPE}\nvariants: {{a: {{beta1: 2}}}}",
            "beta1 must be at least 0 and below 1",
        ),
        (f"recipe: {ROOT}/recipes/sample.py\nvariants: {{a: {{}}}}", "variant a: "),
        ("recipe: quickstart\nvariants: {0.10: {}, 0.1: {}}", "0.1 cannot be a variant's name"),
        ("recipe: quickstart\nvariants: {_c: {}}", "'_c' cannot be a variant's name"),
        ("recipe: quickstart\nvariants: {'a|b': {}}", "cannot be a variant's name"),
        ("recipe: quickstart\nvariants: {'$x$': {}}", "cannot be a variant's name"),
        ("recipe: quickstart\nvariants: {a: 0}", "a is 0, expected `name: value` lines"),
        ("recipe: quickstart\nvariants: {a: {beta1: }}", "a has no value for beta1"),
        ("recipe: quickstart\nvariants: {a: {dry_run: true}}", "dry_run, which ends a run before"),
        ("recipe: quickstart\nvariants: {a: {patience: 2}}", "patience, which ends a run before"),
        ("recipe: quickstart\nvariants: {a: {warmup_share: abc}}", "give a number from 0 to 1"),
        ("recipe: quickstart\nvariants: {a: {warmup_share: 2}}", "give a number from 0 to 1"),
        (
            "recipe: quickstart\nvariants: {a: {warmup_share: 0.1, warmup_steps: 3}}",
            "a sets warmup_steps and warmup_share: leave one out",
        ),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {tokens: []}", "give numbers above 0"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {tokens: .inf}", "give numbers above 0"),
        ("recipe: quickstart\nvariants: {a: {}}\nbudget: {tokens: [9, 9]}", "each number once"),
        (
            f"recipe: {RECIPE}\nvariants: {{a: {{beta1: [0.8, 0.9]}}}}",
            "variant a: .*unknown option 0.9",
        ),
        (f"recipe: {RECIPE}\nvariants: {{a: {{beta1: {{x: 1}}}}}}", "variant a: beta1 cannot be"),
        (f"recipe: {RECIPE}\nvariants: {{a: {{n_head: 5}}}}", "variant a: .*n_head"),
        (f"recipe: {RECIPE}\nvariants: {{a: {{eval_every: 0}}}}", "variant a: eval_every is 0"),
        (
            f"recipe: {RECIPE}\nvariants: {{a: {{}}, b: {{log_every: 5}}}}",
            "variant b has the same settings as a",
        ),
        (
            f"recipe: {RECIPE}\nvariants: {{a: {{}}}}\nbudget: {{tokens: [524288, 524289]}}",
            "two budgets are the same number of updates of the variant a",
        ),
        *(
            (f"recipe: {RECIPE}\nvariants: {{a: {{}}}}\ntune: {{trials: 3, axes: {axes}}}", words)
            for axes, words in (
                ("{learning_rate: [abc, 1]}", "tune: .*learning_rate"),
                ("{learning_rate: [[1], [2]]}", "tune: learning_rate cannot be"),
                ("{learning_rate: [2e-3, 1e-3]}", "have to be different, and numbers to rise"),
                ("{learning_rate: [1e-3, 0.001]}", "have to be different, and numbers to rise"),
                ("{save_every: [1, 2]}", "save_every does not change a run's loss"),
                ("{beta2: [0.95, 1.5]}", "tune: beta2 must be at least 0 and below 1"),
                ("{eval_every: [0, 250]}", "eval_every of the variant a cannot be 0"),
                ("{warmup_share: [0.1, 2]}", "give numbers from 0 to 1"),
                ("{weight_decay: [0, 1]}", "weight_decay of the variant a is 0.1, which is not on"),
            )
        ),
        ("recipe: [", "not valid YAML"),
    ],
)
def test_bad_studies_are_refused_in_a_sentence(content, words, data_dir, tmp_path):
    content = content.replace(RECIPE, f"{RECIPE}\nsettings: {{data_dir: {data_dir}}}")
    path = tmp_path / "study.yaml"
    path.write_text(content)
    done = compare(path, tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(words, done.stderr.splitlines()[-1]), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_runs_recipe_and_settings_are_those_that_the_study_read(data_dir, tmp_path):
    """A recipe that is edited meanwhile does not change the runs; what it imports may, and such a run is not recorded."""
    script, rates = tmp_path / "recipe.py", tmp_path / "rates.py"
    rates.write_text("RATE = 1e-3\n")
    text = (
        "import sys\nsys.path.append({!r})\nfrom train_script import *\nfrom rates import RATE\n\n"
        "if __name__ == '__main__':\n"
        "    config = parse_config(TrainConfig)\n"
        "    config.learning_rate, config.beta2 = RATE, 0.9\n"
        "    cli.run(lambda: train(config))\n".format(str(ROOT / "tests"))
    )
    script.write_text(text)
    path = study_file(tmp_path, data_dir, recipe=str(script), variants={"one": {}}, seeds=4)
    out, log = tmp_path / "out", tmp_path / "log"
    started = Started(COMPARE, path, "--output_dir", out, "--processes", 1, log=log)
    wait_until(lambda: list(out.glob("runs/*/config.yaml")))
    script.write_text(text.replace("0.9", "0.8"))
    wait_until(lambda: len(list(out.glob("runs/*/config.yaml"))) > 2)
    rates.write_text("RATE = 1e-4\nNAME = 'another'\n")
    assert started.wait() == 1
    assert "trained with another learning_rate, since its recipe changed" in log.read_text()
    found = {row["id"] for row in rows(out)}
    assert 2 <= len(found) < 4
    for folder in out.glob("runs/*"):
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        assert settings["beta2"] == 0.9
        assert (settings["learning_rate"] == 1e-3) == (folder.name in found)


def test_a_variants_warmup_steps_replace_the_share_of_all(data_dir, tmp_path):
    variants = {"share": {}, "steps": {"warmup_steps": 7}}
    study = read_study(study_file(tmp_path, data_dir, variants=variants), ROOT / "recipes")
    trials = {name: first_trial(study, name) for name in study.variants}
    steps = {
        name: with_budget(study, None, trial, amount=12 * 128).config.warmup_steps
        for name, trial in trials.items()
    }
    assert steps == {"share": 1, "steps": 7}


@pytest.mark.parametrize(
    "own, base, word",
    [
        ([math.inf, 1.0, 1.1], [2.0, 2.0, 2.1], "diverged more often"),
        ([1.0, 1.0, 1.1], [2.0, math.inf, 2.1], "diverged less often"),
        ([math.inf, 1.0, 1.1], [None, 2.0, 2.05], "better"),  # of the first pair one run is missing
        ([math.inf, 1.0, 1.1, 1.0], [2.0, 2.0, 2.05, math.inf], "better"),
    ],
)
def test_a_verdict_counts_divergence_within_pairs(own, base, word, data_dir, tmp_path):
    study = read_study(study_file(tmp_path, data_dir), ROOT / "recipes")

    def variant(name, losses):
        found = [loss and Result(str(i), "", 1, 1, 1, 1.0, loss) for i, loss in enumerate(losses)]
        return Variant(name, None, None, {1536.0: found})

    outcome = Comparison(study, [variant("full", base), variant("half", own)], {})
    assert outcome.verdict(outcome.variants[1], 1536.0).word == word


def test_unequal_tokens_are_said(data_dir, tmp_path):
    variants = {"one": {}, "double": {"total_batch_size": 256}}
    path = study_file(tmp_path, data_dir, variants=variants, seeds=1, budget={"tokens": 3 * 128})
    done = compare(path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "one with 384 tokens has 25.0% fewer tokens than double" in done.stdout


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes/studies").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_shipped_studies_have_possible_settings(path, data_dir):
    study = read_study(path, ROOT / "recipes")
    study = replace(study, settings={**study.settings, "data_dir": str(data_dir)})
    for name in study.variants:
        variant = Variant(name, first_trial(study, name))
        check_on_axes(study, variant)
        trial = with_budget(study, None, variant.trial, amount=study.budgets[-1])
        assert trial.config.max_steps > 100


def test_one_slot_for_each_visible_gpu_or_core(monkeypatch):
    monkeypatch.setattr("gpt2_accel.study.children.ask", lambda question: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a, 5,MIG-7")
    found = [slot.env["CUDA_VISIBLE_DEVICES"] for slot in slots(None, {})]
    assert found == ["GPU-1a", "5", "MIG-7"]
    assert len(slots(2, {})) == 2
    cores = [slot.core for slot in slots(None, {"ACCELERATE_USE_CPU": "true"})]
    assert len(cores) == len(set(cores)) == usable_cpus()
