"""CORE on small bundles, compared with a plain loop over transformers' GPT-2 that scores one whole prompt at a time."""

import json
import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import make_text, run, run_recipe, write_lines
from launching import launch
from transformers import GPT2LMHeadModel

from gpt2_accel import from_pretrained
from gpt2_accel.evals.core import Core, open_bundle, read_tasks
from gpt2_accel.tokenizer import load_tokenizer

BASELINES = {"Choices": 25, "Pronouns": 50, "Endings": 0, "Alone": 25}


def words(rng: random.Random, most: int) -> str:
    return make_text(rng.randint(1, most), rng.randrange(10**6)).strip()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle with a task of each type, with and without examples; some prompts exceed the model's positions."""
    folder, rng = tmp_path_factory.mktemp("core") / "eval_bundle", random.Random(0)
    (folder / "eval_data" / "small").mkdir(parents=True)
    choices = [
        {"query": words(rng, 6), "choices": [words(rng, 4) for _ in range(n)], "gold": n - 2}
        for n in [4, 4, 3, 2, 4, 5, 4] * 2
    ]
    alone = [{**item, "choices": item["choices"][:2], "gold": 1} for item in choices]
    pronouns = [
        {
            "context_options": [words(rng, 3), words(rng, 5)],
            "continuation": words(rng, 4),
            "gold": i % 2,
        }
        for i in range(9)
    ]
    endings = [{"context": f" {words(rng, 5)} ", "continuation": words(rng, 1)} for _ in range(12)]
    endings += [{"context": "the cat sa", "continuation": "t"}] * 3
    tasks = [
        ("Choices", "multiple_choice", 3, choices, {"continuation_delimiter": "\nAnswer: "}),
        ("Alone", "multiple_choice", 0, alone, {}),
        ("Pronouns", "schema", 1, pronouns, {}),
        ("Endings", "language_modeling", 2, endings, {"continuation_delimiter": ""}),
    ]
    listed = []
    for name, kind, examples, items, more in tasks:
        file = f"small/{name}.jsonl"
        write_lines(folder / "eval_data" / file, items)
        listed.append(
            {"label": name, "dataset_uri": file, "num_fewshot": [examples], "icl_task_type": kind}
            | more
        )
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": listed}))
    lines = [
        "Eval Task,Task Category,Random baseline",
        *(f"{n},x,{b}" for n, b in BASELINES.items()),
    ]
    (folder / "eval_meta_data.csv").write_text("\n".join(lines))
    return folder


@torch.no_grad()
def scores(hf, before: str, whole: str, positions: int) -> tuple[float, bool]:
    """Returns the mean loss of the end of a text of bytes, after what stands `before`, and whether greedy decoding gives it."""
    ids, length = [256, *whole.encode()], len(whole.encode()) - len(before.encode())
    ids = ids[-(positions + 1) :]
    logits = hf(torch.tensor([ids[:-1]])).logits[0, -length:]
    target = torch.tensor(ids[-length:])
    return F.cross_entropy(logits, target).item(), bool((logits.argmax(-1) == target).all())


def common(texts: list[str]) -> str:
    """Returns the text with which all texts begin."""
    size = 0
    while size < min(map(len, texts)) - 1 and len({text[size] for text in texts}) == 1:
        size += 1
    return texts[0][:size]


def plain_core(hf, folder, positions: int) -> dict[str, float]:
    """Returns CORE and the accuracy of each task by a plain loop."""
    found, centred = {}, []
    for task in json.loads((folder / "core.yaml").read_text())["icl_tasks"]:
        path, kind = folder / "eval_data" / task["dataset_uri"], task["icl_task_type"]
        items = [json.loads(line) for line in path.read_text().splitlines()]
        random.Random(1337).shuffle(items)
        between, right = task.get("continuation_delimiter", " "), 0
        for i, item in enumerate(items):
            rng, start = random.Random(1234 + i), ""
            others = [j for j in range(len(items)) if j != i]
            for other in (items[j] for j in rng.sample(others, task["num_fewshot"][0])):
                if kind == "multiple_choice":
                    start += other["query"] + between + other["choices"][other["gold"]]
                elif kind == "schema":
                    start += (
                        other["context_options"][other["gold"]] + between + other["continuation"]
                    )
                else:
                    start += other["context"].strip() + between + other["continuation"]
                start += "\n\n"
            if kind == "language_modeling":
                before = start + item["context"].strip()
                whole = before + between + item["continuation"]
                right += scores(hf, before, whole, positions)[1]
                continue
            if kind == "multiple_choice":
                texts = [start + item["query"] + between + choice for choice in item["choices"]]
                pairs = [(common(texts), text) for text in texts]
            else:
                texts = [
                    start + c + between + item["continuation"] for c in item["context_options"]
                ]
                same = len(common([text[::-1] for text in texts]))
                pairs = [(text[:-same], text) for text in texts]
            losses = [scores(hf, *pair, positions)[0] for pair in pairs]
            right += losses.index(min(losses)) == item["gold"]
        found[f"core/{task['label']}"] = right / len(items)
        guessing = BASELINES[task["label"]] / 100
        centred.append((right / len(items) - guessing) / (1 - guessing))
    return {"core/core": sum(centred) / len(centred), **found}


def test_core_equals_a_plain_loop(accelerator, trained, bundle, capsys):
    model, hf = from_pretrained(trained), GPT2LMHeadModel.from_pretrained(trained).eval()
    positions = model.config.n_positions
    found = Core(bundle, load_tokenizer(trained), model.config)(accelerator, model)
    expected = plain_core(hf, bundle, positions)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < expected["core/Endings"] < 1 and 0 < expected["core/Choices"] < 1
    assert 0 < found["core/core_stderr"] < 1
    assert "exceed the model's positions" in capsys.readouterr().out
    stopped = Core(bundle, load_tokenizer(trained), model.config)
    assert stopped(accelerator, model, lambda: True) == {}


def test_the_recipe_finds_the_same_on_one_and_two_processes(trained, bundle, tmp_path, capsys):
    flags = ["--model", str(trained), "--tasks", "core", "--data", str(bundle), "--output"]
    run_recipe("evaluate", *flags, str(tmp_path / "one.json"))
    assert "| core/core" in capsys.readouterr().out
    done = launch("recipes/evaluate.py", *flags, tmp_path / "two.json", processes=2)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
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
    assert len(read_tasks(open_bundle(packed))) == len(read_tasks(open_bundle(bundle))) == 4
    assert [len(task.items) for task in read_tasks(bundle, 5)] == [5] * 4
    lines = (bundle / "eval_data/small/Endings.jsonl").read_text().splitlines()
    random.Random(1337).shuffle(lines)
    assert read_tasks(bundle, 5)[3].items == [json.loads(line) for line in lines[:5]]
    with pytest.raises(FileNotFoundError, match="cannot be read as DCLM's bundle"):
        open_bundle(tmp_path)
    with pytest.raises(FileNotFoundError, match="give its folder, ZIP file or URL"):
        open_bundle()
