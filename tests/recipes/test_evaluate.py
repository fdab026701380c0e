"""Runs recipes/evaluate.py as a user does, and compares with lm-evaluation-harness if it is installed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import hellaswag_items, load_recipe, make_text, run, run_recipe, tiny_config
from datasets import Dataset
from hub_server import TOKEN, Hub
from huggingface_hub import ModelCard
from launching import ROOT, launch, python

import gpt2_accel.evals.tasks as tasks_module
from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.evals import sources
from gpt2_accel.evals.results_table import BASELINES, markdown_table
from gpt2_accel.hf.convert import to_hf
from gpt2_accel.hf.safetensors_files import write_safetensors
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import GPT2_FINGERPRINT, byte_tokenizer

HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture(scope="module")
def model(trained, tmp_path_factory):
    """A run's folder, whose model card and evaluations change."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("evaluate") / "run", symlinks=True)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """A folder of local files: HellaSwag with the original's fields and markup, LAMBADA, WikiText, PTB."""
    folder = tmp_path_factory.mktemp("items")
    lines = hellaswag_items(30)
    for i, item in enumerate(lines):
        first, _, second = item["ctx"].partition(" ")
        item |= {
            "ctx_a": f"[header] {first} [title] x",
            "ctx_b": second,
            "label": str(item["label"]),
        }
        item["endings"][i % 4] += " [step] Then  on"
    write_lines(folder / "hellaswag.jsonl", lines)
    write_lines(folder / "lambada.jsonl", [{"text": make_text(9, i)[:-2]} for i in range(20)])
    pages = [f' = A =\n \n {make_text(60, i)} @-@ ( b ) , \'s " c " \n' for i in range(3)]
    write_lines(folder / "wikitext2.jsonl", [{"page": page} for page in pages])
    (folder / "ptb.txt").write_text("it 's the cat 's N % mat\n" * 9)
    return folder


def write_lines(path: Path, entries: list[dict]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


TASKS = ["hellaswag", "hellaswag_lm_eval", "lambada", "wikitext2", "ptb", "text"]


def flags_of(model, items, data_dir) -> list[str]:
    files = {
        "hellaswag": "hellaswag.jsonl",
        "hellaswag_lm_eval": "hellaswag.jsonl",
        "lambada": "lambada.jsonl",
        "wikitext2": "wikitext2.jsonl",
        "ptb": "ptb.txt",
        "text": "ptb.txt",
    }
    data = [f"{task}={items / files[task]}" for task in TASKS]
    return ["--model", str(model), "--tasks", *TASKS, "--data", *data, "--data_dir", str(data_dir)]


def test_all_tasks_give_the_same_results_on_one_and_two_processes(
    model, items, data_dir, tmp_path, capsys
):
    flags = flags_of(model, items, data_dir)
    before = ModelCard.load(model / "README.md").data.eval_results
    run_recipe("evaluate", *flags, "--sample_prompts", "the ", "--update_card")
    said = capsys.readouterr().out
    [[name, one]] = json.loads((model / "evaluation.json").read_text()).items()
    assert name == str(model)
    assert {key.partition("/")[0] for key in one["results"]} == {*TASKS, "train", "val"}
    assert all(one["conventions"].values()), "each metric says how it is computed"
    assert "published" not in said  # the items are not the Hub's
    assert f"{one['results']['hellaswag/acc']:.4f} ± " in said
    assert "of 30 contexts are too long for the model's 64 positions and were cut" in said
    assert "sample: the " in said
    logged = [json.loads(line) for line in (model / "metrics.jsonl").open()][-1]
    assert one["results"]["val/loss"] == pytest.approx(logged["val/loss"], abs=1e-5)

    card = ModelCard.load(model / "README.md")
    found = {result.metric_name: result for result in card.data.eval_results}
    assert found["hellaswag/acc"].dataset_type == "Rowan/hellaswag"
    assert found["hellaswag/acc"].metric_value == round(one["results"]["hellaswag/acc"], 6)
    assert not any(name.endswith("_stderr") for name in found)
    assert {result.metric_name for result in before} < set(found) and "```yaml" in card.text
    assert len(found) == len(card.data.eval_results)

    extra = []
    if HARNESS:
        extra = ["--lm_eval", "local_hellaswag", "--lm_eval_tasks", harness_tasks(items, tmp_path)]
    done = launch(
        "recipes/evaluate.py", *flags, "--output", str(tmp_path / "two.json"), *extra, processes=2
    )
    assert done.returncode == 0, done.stderr
    [two] = json.loads((tmp_path / "two.json").read_text()).values()
    ours = {key: value for key, value in two["results"].items() if not key.startswith("lm_eval:")}
    assert ours == pytest.approx(one["results"], rel=1e-6)
    if HARNESS:
        assert_equal_to_harness(two["results"])


def test_evaluations_are_merged_by_weights(model, items, tmp_path):
    copied, output = tmp_path / "run", tmp_path / "record.json"
    shutil.copytree(model, copied)
    text = ["--data", items / "ptb.txt"]

    def record(*flags):
        run_recipe("evaluate", "--model", copied, "--output", output, *flags)
        return json.loads(output.read_text())

    first = record("--tasks", "ptb", *text)[str(copied)]
    assert first["step"] == 250
    second = record("--tasks", "text", *text, "--limit", "1")[str(copied)]
    assert second["results"].items() > first["results"].items()
    assert {note.partition(": ")[0] for note in second["notes"]} == {"ptb", "text"}
    again = record("--tasks", "text", *text)[str(copied)]  # replaces the limited evaluation
    assert again["results"] == second["results"] and len(again["notes"]) < len(second["notes"])

    shutil.copy(model / "checkpoint-250/model.safetensors", tmp_path / "weights")
    plain = from_pretrained(copied)
    plain.wte.weight.data[0] += 1
    write_safetensors(copied / "model.safetensors", to_hf(plain))
    both = record("--tasks", "text", *text)
    assert {name: entry["results"].keys() for name, entry in both.items()} == {
        str(copied): {name for name in second["results"] if name.startswith("text/")},
        f"{copied} (step 250, weights {again['weights'][:12]}, no)": second["results"].keys(),
    }
    shutil.move(tmp_path / "weights", copied / "model.safetensors")
    found = record("--tasks", "ptb", *text)  # added to the entry of the same weights
    assert found[str(copied)]["results"] == second["results"] and len(found) == 2

    for other in ('{"a": 1}', "[" * 100_000, "no JSON"):
        output.write_text(other)
        with pytest.raises(ValueError, match="does not hold evaluations"):
            record("--tasks", "text", *text)
        assert output.read_text() == other


def test_published_figures_are_shown_only_for_the_same_data(data_dir, tmp_path):
    recipe = load_recipe("evaluate")

    def tasks(**settings):
        config = recipe.Evaluate(**settings)
        return recipe.comparable(config, recipe.local_files(config))

    assert tasks(tasks=["ptb", "lambada"], data=["ptb=x.txt"]) == {"lambada"}
    assert tasks(tasks=["ptb"], limit=5) == tasks(data_dir=str(data_dir)) == set()
    manifest = json.loads((data_dir / "manifest.json").read_text())
    manifest["tokenizer"] |= {"fingerprint": GPT2_FINGERPRINT}
    for source, expected in (("Skylion007/openwebtext", {"train", "val"}), ("fineweb", set())):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "source": source}))
        assert tasks(data_dir=str(tmp_path)) == expected


def harness_tasks(items: Path, folder: Path) -> str:
    """Writes copies of the harness's HellaSwag and WikiText tasks that read the local files; returns their folder."""
    import lm_eval.tasks

    built_in = Path(lm_eval.tasks.__file__).parent
    for name, split in (("hellaswag", "validation"), ("wikitext", "test")):
        file = next(items.glob(f"{name}*.jsonl"))
        task = {
            "include": str(built_in / name / f"{name}.yaml"),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file)}},
            "training_split": None,
            "validation_split": split if split == "validation" else None,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return str(folder)


def assert_equal_to_harness(results: dict[str, float]) -> None:
    """Asserts that the HellaSwag results equal the harness's."""
    theirs = "lm_eval:local_hellaswag"
    for name, theirs_name in {"acc": "acc", "acc_norm_per_char": "acc_norm"}.items():
        for error in ("", "_stderr"):
            ours = results[f"hellaswag_lm_eval/{name}{error}"]
            assert ours == pytest.approx(results[f"{theirs}/{theirs_name}{error}"], abs=1e-12)


@pytest.mark.skipif(not HARNESS, reason="needs lm-eval")
@pytest.mark.parametrize("shape", [None, LlamaConfig, Qwen3Config])
def test_results_equal_the_harness(shape, request, items, data_dir, tmp_path):
    from accelerate import Accelerator
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    from gpt2_accel.evals.detokenize import lm_eval_wikitext
    from gpt2_accel.evals.harness import run_harness

    if shape is None:
        model = request.getfixturevalue("model")
    else:
        model = tmp_path / "model"
        save_pretrained(shape(257, 64, 2, 2, 1, 16, 32, 96).build(), model, byte_tokenizer())
    output = tmp_path / "out.json"
    tasks = harness_tasks(items, tmp_path)
    run_recipe(
        "evaluate", *flags_of(model, items, data_dir), "--output", output,
        "--lm_eval", "local_hellaswag", "local_wikitext", "--lm_eval_tasks", tasks,
    )  # fmt: skip
    [found] = json.loads(output.read_text()).values()
    results = found["results"]
    assert_equal_to_harness(results)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        theirs = results[f"lm_eval:local_wikitext/{name}"]
        assert results[f"wikitext2/lm_eval_{name}"] == pytest.approx(theirs, rel=1e-4)
    for page in [
        " ".join(words) for words in zip(*[iter(make_text(40, 1).split())] * 4, strict=False)
    ]:
        page = f"( {page} ) @,@ 's \" {page} \" ' {page} ' ; = = {page} = = \n"
        assert lm_eval_wikitext(page) == wikitext_detokenizer({"page": page})
    with pytest.raises(ValueError, match="has no task 'no_such_task'"):
        run_harness(Accelerator(cpu=True), model, ["no_such_task"])


@pytest.mark.skipif(HARNESS, reason="the extra is installed")
def test_a_missing_harness_is_refused_with_the_install_command(model):
    done = python("recipes/evaluate.py", "--model", str(model), "--lm_eval", "arc_easy")
    [line] = [line for line in done.stderr.splitlines() if line.startswith("evaluate.py: ")]
    assert "pip install 'lm-eval>=0.4.9'" in line and "Traceback" not in done.stderr


def test_mistakes_in_files_are_refused_before_scoring(
    model, items, data_dir, tmp_path, monkeypatch
):
    def mistake(*flags, message):
        with pytest.raises((ValueError, OSError), match=message):
            run_recipe("evaluate", "--model", model, *flags)

    # All items are checked before the first is scored.
    scored = []
    monkeypatch.setattr("gpt2_accel.evals.hellaswag.score", lambda *_: scored.append(0))
    files = [f"hellaswag={items / 'hellaswag.jsonl'}", f"lambada={items / 'hellaswag.jsonl'}"]
    both = ["--tasks", "hellaswag", "lambada", "--data", *files]
    mistake(*both, message="hellaswag.jsonl, line 1 has no field 'text'")
    assert scored == []

    other = tmp_path / "other"
    run(tiny_config(data_dir, other, max_steps=1))
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["added_tokens"].append(
        {**vocabulary["added_tokens"][0], "id": 257, "content": "<|extra|>"}
    )
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    ptb = ("--tasks", "ptb", "--data", items / "ptb.txt")
    mistake("--model", other, *ptb, message="has a tokenizer of 258 tokens")


def test_items_and_files_that_are_too_long_are_refused(items, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE", 2000)
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("a\n" + "b " * 1001)
    rows.write_text('{"text": "a"}\n{"text": "' + "b" * 2000 + '"}\n')
    for task, path, place in (
        ("lambada", text, "a.txt, line 2,"),
        ("text", text, "a.txt"),
        ("lambada", rows, "a.jsonl, line 2,"),
    ):
        with pytest.raises(
            ValueError, match=f"{place} has [0-9,]* characters, more than the 2,000"
        ):
            sources.read_items(task, path)
    monkeypatch.setattr(sources, "LARGEST_FILE", 1000)
    with pytest.raises(ValueError, match="a.txt has 2,004 bytes, at most 1,000 are read"):
        sources.read_items("text", text)
    rows.write_text("[" * 900)
    with pytest.raises(ValueError, match="line 1, is not valid JSON"):
        sources.read_items("hellaswag", rows)


def test_items_from_the_hub_are_read_from_its_parquet_files(tmp_path):
    lines = [{**item, "label": str(item["label"])} for item in hellaswag_items(6)]
    tables = {
        "Rowan/hellaswag": ("default/validation", Dataset.from_list(lines)),
        "ptb-text-only/ptb_text_only": (
            "penn_treebank/test",
            Dataset.from_dict({"sentence": ["it 's a cat", "no it is n't"]}),
        ),
    }
    read = "from gpt2_accel.evals.sources import read_items, texts; import json; "
    read += "print(json.dumps([read_items('hellaswag'), texts('ptb', read_items('ptb'))]))"
    command = [sys.executable, "-c", read]
    options = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 120}
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
    with Hub() as hub:
        for name, (folder, table) in tables.items():
            table.to_parquet(tmp_path / "table.parquet")
            files = {f"{folder}/0000.parquet": (tmp_path / "table.parquet").read_bytes()}
            hub.repos[name] = {"private": False, "commits": [("a" * 40, files)]}
        env |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(command, env=env, **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [lines, ["it 's a cat", "no it is n't"]]


def test_the_table_shows_published_figures_beside_the_results():
    found = {
        "runs/mine": {
            "hellaswag/acc_norm_per_token": 0.25,
            "hellaswag/acc_norm_per_token_stderr": 0.01,
        }
    }
    assert "published" not in markdown_table(found, {"val"})
    header, _, row = markdown_table(found, {"hellaswag"}).splitlines()
    assert header.split("|")[2].strip() == "runs/mine" and "gpt2-xl, published" in header
    assert [cell.strip() for cell in row.split("|")][1:7] == [
        "hellaswag/acc_norm_per_token", "0.2500 ± 0.0100", "0.2945", "0.3752", "0.432", "0.4889",
    ]  # fmt: skip
    baselines = {
        name: {"val/loss": 3.0 + i, "val/loss_stderr": 0.1} for i, name in enumerate(BASELINES)
    }
    assert "2.84" not in markdown_table(baselines)
    header, _, row = markdown_table(baselines, {"val"}).splitlines()
    assert "published" not in header
    assert "4.0000 ± 0.1000 (2.84)" in row and "nanoGPT, on OpenWebText" in row


def test_results_survive_the_removal_of_their_checkpoint(data_dir, tmp_path, monkeypatch):
    """A run that trains meanwhile removes its older checkpoints."""
    run(tiny_config(data_dir, tmp_path / "run", max_steps=4, save_every=2))
    (tmp_path / "run/status.json").write_text('{"state": "running"}')
    honest = tasks_module.open_split

    def removing(*args):
        shutil.rmtree(tmp_path / "run/checkpoint-4", ignore_errors=True)
        return honest(*args)

    monkeypatch.setattr(tasks_module, "open_split", removing)
    run_recipe("evaluate", "--model", tmp_path / "run", "--data_dir", data_dir)
    [entry] = json.loads((tmp_path / "run/evaluation.json").read_text()).values()
    assert entry["step"] == 4 and len(entry["weights"]) == 64
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "run/checkpoint-4")
    named = ("--model", tmp_path / "run/checkpoint-4", "--verify", "false")
    run_recipe("evaluate", *named, "--data_dir", data_dir)
    assert not (tmp_path / "run/checkpoint-4").exists()
    assert len(json.loads((tmp_path / "run/evaluation.json").read_text())) == 2
