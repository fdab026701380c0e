"""CORE on a small bundle, compared with its rules, those of nanochat's `core_eval.py`.

The rules are applied to one prompt at a time, by transformers' GPT-2.
"""

import csv
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import make_text, read_json, refused, run, run_recipe, write_lines
from launching import launch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_accel import from_pretrained
from gpt2_accel.evals.core import Core, open_bundle, read_tasks
from gpt2_accel.tokenizer import load_tokenizer, train_bpe

POSITIONS, START = 48, 299


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """The directory of a random GPT-2 with a BPE, whose next token depends on each token."""
    folder = tmp_path_factory.mktemp("spoken")
    shape = {"n_positions": POSITIONS, "n_layer": 1, "n_head": 2, "n_embd": 16}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, **shape, initializer_range=0.5)).save_pretrained(
        folder
    )
    train_bpe([make_text(500, 1)], 300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(spoken, tmp_path_factory):
    """The bundle of `core_bundle/`, and items whose continuations the model says."""
    folder, rng = tmp_path_factory.mktemp("core") / "eval_bundle", random.Random(0)
    shutil.copytree(Path(__file__).with_name("core_bundle"), folder)
    said, (encode, logits) = [], rules(spoken)
    while len(said) < 12:
        context = make_text(rng.randint(1, 60), rng.randrange(10**6)).strip()
        ids = [START, *encode(context)]
        ids.append(int(logits([*ids, 0])[-1].argmax()))
        continuation = load_tokenizer(spoken).decode(ids[-1])
        if encode(context + continuation) == ids[1:]:
            said.append({"context": context, "continuation": continuation})
    said += [{"context": "the cat sa", "continuation": "t"}] * 3  # the token "at"
    write_lines(folder / "eval_data/small/said.jsonl", said)
    return folder


def rules(folder):
    """Returns functions that encode a text, and give the logits of a prompt's tokens, (n, V)."""
    backend = load_tokenizer(folder).backend_tokenizer
    hf = GPT2LMHeadModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def logits(ids):
        return hf(torch.tensor([ids[-POSITIONS:][:-1]])).logits[0]

    return (lambda text: backend.encode(text, add_special_tokens=False).ids), logits


def common(rows: list[list[int]]) -> int:
    """Returns the number of first tokens that all rows share."""
    for place, ids in enumerate(zip(*rows, strict=False)):
        if len(set(ids)) > 1:
            return place
    return min(map(len, rows))


def shuffled(path) -> list[dict]:
    """Returns the items of a task in the order in which they are asked."""
    items = [json.loads(line) for line in path.read_text().splitlines()]
    random.Random(1337).shuffle(items)
    return items


def core_by_its_rules(spoken, folder) -> dict[str, float]:
    """Returns CORE, the accuracy of each task and the number of unaligned items."""
    encode, logits = rules(spoken)
    found, centred, unaligned = {}, [], 0
    with open(folder / "eval_meta_data.csv", newline="") as file:
        baselines = {row["Eval Task"]: row["Random baseline"] for row in csv.DictReader(file)}
    for task in yaml.safe_load((folder / "core.yaml").read_text())["icl_tasks"]:
        kind, items = task["icl_task_type"], shuffled(folder / "eval_data" / task["dataset_uri"])
        between, right = task.get("continuation_delimiter", " "), 0

        def written(item, option, between=between):
            if "choices" in item:
                return item["query"] + between + item["choices"][option]
            if "context_options" in item:
                return item["context_options"][option] + between + item["continuation"]
            return item["context"].strip() + between + item["continuation"]

        for i, item in enumerate(items):
            others = [j for j in range(len(items)) if j != i]
            drawn = random.Random(1234 + i).sample(others, task["num_fewshot"][0])
            shown = "".join(written(items[j], items[j].get("gold", 0)) + "\n\n" for j in drawn)
            options = len(item.get("choices", item.get("context_options", [0])))
            rows = [[START, *encode(shown + written(item, k))] for k in range(options)]
            if kind == "language_modeling":
                before = shown + item["context"].strip() + between
                before = [START, *encode(before.strip())]
                ends = [len(rows[0]) - common([rows[0], before])]
                unaligned += rows[0][: len(before)] != before
                right += logits(rows[0])[-ends[0] :].argmax(-1).tolist() == rows[0][-ends[0] :]
                continue
            if kind == "schema":
                ends = [common([row[::-1] for row in rows])] * options
            else:
                ends = [len(row) - common(rows) for row in rows]
            losses = []
            for row, end in zip(rows, ends, strict=True):
                losses.append(cross_entropy(logits(row)[-end:], torch.tensor(row[-end:])).item())
            right += losses.index(min(losses)) == item["gold"]
        found[f"core/{task['label']}"] = right / len(items)
        guessing = float(baselines[task["label"]]) / 100
        centred.append((right / len(items) - guessing) / (1 - guessing))
    core = sum(centred) / len(centred)
    return {"core/core": core, "core/unaligned_items": unaligned, **found}


def test_core_follows_its_rules(accelerator, spoken, bundle):
    model, expected = from_pretrained(spoken), core_by_its_rules(spoken, bundle)
    core = Core(bundle, load_tokenizer(spoken), model.config)
    found = core(accelerator, model)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert expected["core/Said"] == 12 / 15 and expected["core/unaligned_items"] == 3
    assert 0 < expected["core/Choices"] < 1 and 0 < found["core/core_stderr"] < 1
    assert found["core/cut_prompts"] > 0
    assert core(accelerator, model, lambda: True) == {}


def test_the_recipe_finds_the_same_on_one_and_two_processes(spoken, bundle, tmp_path, capsys):
    flags = ["--model", str(spoken), "--tasks", "core", "--data", str(bundle), "--output"]
    run_recipe("evaluate", *flags, str(tmp_path / "one.json"))
    assert "| core/core" in capsys.readouterr().out
    launch("recipes/evaluate.py", *flags, tmp_path / "two.json", processes=2)
    one, two = (read_json(tmp_path / f"{n}.json") for n in ("one", "two"))
    ([first], [second]) = one.values(), two.values()
    assert first["results"] == pytest.approx(second["results"])
    assert set(first["results"]) > {"core/core", "core/core_stderr", "core/Endings"}


def test_a_run_logs_core(tiny, bundle, accelerator, tmp_path):
    lines = run(tiny("run", core_every=2, core_data=str(bundle), max_steps=2))
    model = from_pretrained(tmp_path / "run")
    found = Core(bundle, load_tokenizer(tmp_path / "run"), model.config)(accelerator, model)
    assert {name: lines[-1][name] for name in found} == pytest.approx(found)


def test_a_bundle_is_a_folder_or_a_zip_file(bundle, tmp_path):
    packed = shutil.make_archive(str(tmp_path / "eval"), "zip", bundle.parent, bundle.name)
    assert len(read_tasks(open_bundle(packed))) == len(read_tasks(open_bundle(bundle))) == 5
    assert [len(task.items) for task in read_tasks(bundle, 5)] == [5] * 5
    expected = shuffled(bundle / "eval_data/small/endings.jsonl")[:5]
    assert read_tasks(bundle, 5)[3].items == expected
    with refused("CORE bundle"):
        open_bundle(tmp_path)
    with refused("give its folder"):
        open_bundle()
