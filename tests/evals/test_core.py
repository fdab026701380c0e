"""CORE of a small bundle equals a slow computation by the rules of nanochat's `core_eval.py`.

`Reference` runs one prompt at a time through transformers' GPT-2. One rule is this project's: an
item of language modeling is unaligned if the tokens of its context are not a prefix of its tokens;
the tokens after the common prefix are scored, and `core/unaligned_items` counts it.
"""

import csv
import json
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from conftest import make_text, refused, run, write_lines
from tables import table
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_accel import from_pretrained
from gpt2_accel.evals.core import Core, open_bundle, read_tasks
from gpt2_accel.tokenizer import load_tokenizer, train_bpe

POSITIONS = 48
END_OF_TEXT = 299  # the last id


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The directory of a GPT-2 with a BPE. Large random weights: each token affects the next."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"n_positions": POSITIONS, "n_layer": 1, "n_head": 2, "n_embd": 16}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, initializer_range=0.5, **shape))
    model.save_pretrained(folder)
    train_bpe([make_text(500, 1)], 300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(model_dir, tmp_path_factory):
    """The bundle of `core_bundle/`, with the items of its task `Greedy`.

    12 continuations are the model's most probable token. 3 are unaligned: "at" is a token.
    """
    folder = tmp_path_factory.mktemp("core") / "eval_bundle"
    shutil.copytree(Path(__file__).with_name("core_bundle"), folder)
    reference = Reference(model_dir)
    rng = random.Random(0)
    items = []
    while len(items) < 12:
        context = make_text(rng.randint(1, 60), rng.randrange(10**6)).strip()
        ids = reference.encode(context)
        visible = ids[1 - POSITIONS :]  # the continuation takes the last position
        token = int(reference.logits(visible)[-1].argmax())
        continuation = load_tokenizer(model_dir).decode(token)
        if reference.encode(context + continuation) == ids + [token]:
            items.append({"context": context, "continuation": continuation})
    items += [{"context": "the cat sa", "continuation": "t"}] * 3
    write_lines(folder / "eval_data/small/greedy.jsonl", items)
    return folder


class Reference:
    """transformers' GPT-2 and the tokenizer of a model directory."""

    def __init__(self, folder: Path):
        self.backend = load_tokenizer(folder).backend_tokenizer
        self.model = GPT2LMHeadModel.from_pretrained(folder).eval()

    def encode(self, text: str) -> list[int]:
        """Returns END_OF_TEXT and the tokens of the text."""
        return [END_OF_TEXT] + self.backend.encode(text, add_special_tokens=False).ids

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Returns the logits after each of the last POSITIONS tokens, (n, V)."""
        return self.model(torch.tensor([ids[-POSITIONS:]])).logits[0]

    def loss(self, ids: list[int], scored: int) -> float:
        """Returns the mean loss of the last `scored` tokens, in nats."""
        return cross_entropy(self.logits(ids)[-scored - 1 : -1], torch.tensor(ids[-scored:])).item()


def common_prefix(rows: list[list[int]]) -> int:
    """Returns the number of first tokens that all rows share."""
    for position, ids in enumerate(zip(*rows, strict=False)):
        if len(set(ids)) > 1:
            return position
    return min(map(len, rows))


def shuffled(path: Path) -> list[dict]:
    """Returns the items of a task in the order in which they are asked."""
    items = [json.loads(line) for line in path.read_text().splitlines()]
    random.Random(1337).shuffle(items)
    return items


def texts_of(task: dict, item: dict) -> list[str]:
    """Returns the text of an item with each of its options."""
    delimiter = task.get("continuation_delimiter", " ")
    if task["icl_task_type"] == "multiple_choice":
        return [item["query"] + delimiter + choice for choice in item["choices"]]
    contexts = item.get("context_options") or [item["context"].strip()]
    return [context + delimiter + item["continuation"] for context in contexts]


def examples_before(task: dict, items: list[dict], number: int) -> str:
    """Returns the examples before item `number`, with their right options."""
    others = [i for i in range(len(items)) if i != number]
    text = ""
    for i in random.Random(1234 + number).sample(others, task["num_fewshot"][0]):
        text += texts_of(task, items[i])[items[i].get("gold", 0)] + "\n\n"
    return text


def chosen_option(reference: Reference, rows: list[list[int]]) -> int:
    """Returns the choice with the lowest loss after the common prefix."""
    prefix = common_prefix(rows)
    losses = [reference.loss(row, len(row) - prefix) for row in rows]
    return losses.index(min(losses))


def chosen_context(reference: Reference, rows: list[list[int]]) -> int:
    """Returns the context after which the common suffix has the lowest loss."""
    suffix = common_prefix([row[::-1] for row in rows])
    losses = [reference.loss(row, suffix) for row in rows]
    return losses.index(min(losses))


def is_greedy(reference: Reference, row: list[int], context: list[int]) -> bool:
    """Tells whether greedy decoding gives all tokens after the common prefix."""
    scored = len(row) - common_prefix([row, context])
    target = row[-scored:]
    predicted = reference.logits(row)[-scored - 1 : -1].argmax(-1).tolist()
    return predicted == target


def core_by_its_rules(model_dir: Path, bundle: Path) -> dict[str, float]:
    """Returns CORE, the accuracy of each task and the number of unaligned items."""
    reference = Reference(model_dir)
    with open(bundle / "eval_meta_data.csv", newline="") as file:
        baselines = {row["Eval Task"]: row["Random baseline"] for row in csv.DictReader(file)}
    accuracies = {}
    centred = []
    unaligned = 0
    for task in yaml.safe_load((bundle / "core.yaml").read_text())["icl_tasks"]:
        items = shuffled(bundle / "eval_data" / task["dataset_uri"])
        right = 0
        for number, item in enumerate(items):
            examples = examples_before(task, items, number)
            rows = [reference.encode(examples + text) for text in texts_of(task, item)]
            if task["icl_task_type"] == "multiple_choice":
                right += chosen_option(reference, rows) == item["gold"]
            elif task["icl_task_type"] == "schema":
                right += chosen_context(reference, rows) == item["gold"]
            else:
                [row] = rows
                context = item["context"].strip() + task.get("continuation_delimiter", " ")
                context = reference.encode((examples + context).strip())
                right += is_greedy(reference, row, context)
                unaligned += row[: len(context)] != context
        accuracy = right / len(items)
        guessing = float(baselines[task["label"]]) / 100
        accuracies[f"core/{task['label']}"] = accuracy
        centred.append((accuracy - guessing) / (1 - guessing))
    core = sum(centred) / len(centred)
    return {"core/core": core, "core/unaligned_items": unaligned} | accuracies


def test_core_equals_the_reference(accelerator, model_dir, bundle):
    model = from_pretrained(model_dir)
    expected = core_by_its_rules(model_dir, bundle)
    results = Core(bundle, load_tokenizer(model_dir), model.config)(accelerator, model)
    assert {name: results[name] for name in expected} == pytest.approx(expected)
    # The items distinguish right from wrong implementations.
    assert expected["core/Greedy"] == 12 / 15
    assert expected["core/unaligned_items"] == 3
    assert 0 < expected["core/Choices"] < 1
    assert 0 < results["core/core_stderr"] < 1
    assert results["core/cut_prompts"] > 0


def test_a_run_logs_core(tiny, bundle, accelerator, tmp_path):
    lines = run(tiny("run", core_every=2, core_data=str(bundle), max_steps=2))
    model = from_pretrained(tmp_path / "run")
    results = Core(bundle, load_tokenizer(tmp_path / "run"), model.config)(accelerator, model)
    assert {name: lines[-1][name] for name in results} == pytest.approx(results)


@pytest.mark.parametrize(("name", "content", "words"), table("evals/core"))
def test_a_wrong_item_or_baseline_is_refused(bundle, tmp_path, name, content, words):
    shutil.copytree(bundle, tmp_path / "b")
    [path] = (tmp_path / "b").rglob(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with refused(words):
        read_tasks(open_bundle(tmp_path / "b"))


def test_a_replaced_or_damaged_zip_file_is_noticed(bundle, tmp_path):
    path = tmp_path / "b.zip"
    for label in ("Choices", "Renamed"):
        with zipfile.ZipFile(path, "w") as archive:
            for file in bundle.rglob("*.*"):
                text = file.read_text().replace("Choices", label)
                archive.writestr(str(file.relative_to(bundle)), text)
        assert read_tasks(open_bundle(path))[0].name == label
    path.write_bytes(path.read_bytes().replace(b'"choices"', b'"#hoices"', 1))
    with refused("b.zip/eval_data/small/.*Bad CRC-32"):
        read_tasks(open_bundle(path))
