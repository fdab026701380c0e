"""The evaluations equal a plain loop over transformers' GPT-2, one continuation at a time."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    hellaswag_items,
    losses,
    make_text,
    randomized,
    read_json,
    run,
    run_recipe,
    tiny_config,
)
from families import family_model, own_tokenizer
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from gpt2_accel import GPT, GPTConfig, from_pretrained
from gpt2_accel.data.loader import EvalLoader
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.source import open_data
from gpt2_accel.evals.hellaswag import HellaSwag
from gpt2_accel.evals.items import Item, read_items
from gpt2_accel.evals.likelihood import log_likelihoods
from gpt2_accel.evals.perplexity import TextPerplexity
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.tokenizer import byte_tokenizer, char_tokenizer

POSITIONS = 64
SHAPE = GPTConfig(257, n_positions=POSITIONS, n_layer=1, n_head=1, n_embd=8)


@pytest.fixture(scope="module")
def models(trained):
    """A briefly trained model, and the same model in transformers."""
    hf = GPT2LMHeadModel.from_pretrained(trained, dtype=torch.float32)
    return from_pretrained(trained), hf.eval()


def build_hellaswag(items: list[dict]) -> HellaSwag:
    """Returns the evaluation of a byte-level model of 64 positions on these items."""
    numbered = [Item(f"item {number}", item) for number, item in enumerate(items)]
    return HellaSwag(numbered, byte_tokenizer(), SHAPE)


@torch.no_grad()
def plain_loop(hf, context: str, continuation: str) -> list[float]:
    """Returns the loss of each byte of the continuation in nats."""
    prompt, target = list(context.encode()), list(continuation.encode())
    ids = (prompt + target)[-(POSITIONS + 1) :]
    logits = hf(torch.tensor([ids[:-1]])).logits[0, -len(target) :]
    return F.cross_entropy(logits, torch.tensor(target), reduction="none").tolist()


def test_hellaswag_equals_a_plain_loop_over_transformers(accelerator, models):
    model, hf = models
    items = hellaswag_items(30, seed=1)
    task = build_hellaswag(items)
    longest = [max(len(row.ids) for row in question) for question in task.questions]
    assert min(longest) < POSITIONS < max(longest)  # some are cut
    right = {"acc": [], "acc_norm_per_token": [], "acc_norm_per_char": []}
    scores = log_likelihoods(accelerator, model, task.questions, lambda: False)
    for item, row in zip(items, scores, strict=True):
        loop = [plain_loop(hf, item["ctx"], f" {ending}") for ending in item["endings"]]
        nats = list(map(sum, loop))
        assert row == pytest.approx([-x for x in nats], abs=1e-3)
        lengths = {
            "acc": [1] * 4,
            "acc_norm_per_token": [len(tokens) for tokens in loop],
            "acc_norm_per_char": [len(ending) for ending in item["endings"]],
        }
        for name, by in lengths.items():
            choice = min(range(4), key=lambda i: nats[i] / by[i])
            right[name].append(choice == int(item["label"]))
    results = task(accelerator, model)
    for name, hits in right.items():
        assert results[f"hellaswag/{name}"] == sum(hits) / 30
        variance = sum((hit - sum(hits) / 30) ** 2 for hit in hits) / 29
        assert results[f"hellaswag/{name}_stderr"] == pytest.approx(math.sqrt(variance / 30))
    assert len({tuple(hits) for hits in right.values()}) > 1


@pytest.mark.parametrize("stride", [None, 7])
def test_text_perplexity_equals_a_plain_loop_at_each_stride(accelerator, models, stride):
    model, hf = models
    text = make_text(45, 0)
    items = [Item("a.txt", {"text": text})]
    results = TextPerplexity(items, byte_tokenizer(), SHAPE, stride)(accelerator, model)
    ids = [256, *text.removesuffix("\n").encode()]
    nats = []
    start = 1
    while start < len(ids):  # each window predicts the tokens after the previous window
        end = min(len(ids), start + (POSITIONS if start == 1 else stride or POSITIONS))
        window = torch.tensor([ids[max(0, end - 1 - POSITIONS) : end]])
        with torch.no_grad():
            logits = hf(window[:, :-1]).logits[0]
        loss = F.cross_entropy(logits, window[0, 1:], reduction="none")
        nats += loss[-(end - start) :].tolist()
        start = end
    assert len(nats) == len(ids) - 1
    assert results["text/loss"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    bits = sum(nats) / math.log(2) / len(text.strip())
    assert results["text/bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_without_end_of_text_the_first_token_is_context_only(accelerator):
    text = "abcabcabc"
    shape = GPTConfig(3, n_positions=4, n_layer=1, n_head=1, n_embd=8)
    task = TextPerplexity([Item("a.txt", {"text": text})], char_tokenizer(text), shape)
    assert sum(window.predicted for (window,) in task.questions) == 8
    assert 0.8 < task(accelerator, GPT(shape))["text/loss"] < 1.4


def test_the_validation_loss_has_a_standard_error_over_windows(accelerator, models, data_dir):
    model, hf = models
    loader = EvalLoader(
        open_data(data_dir).split("val"), sequence_length=32, batch_size=4, max_tokens=320
    )
    results = validation_loss(accelerator, model, loader=loader)
    losses = []
    for input_ids, targets, *_ in loader:
        logits = hf(input_ids).logits.detach()
        loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        losses += [x.mean() for x, t in zip(loss, targets, strict=True) if (t != -100).any()]
    losses = torch.stack(losses)
    assert len(losses) == 10
    assert results["val/loss"] == pytest.approx(losses.mean().item(), abs=1e-4)
    expected = losses.std().item() / math.sqrt(10)
    assert results["val/loss_stderr"] == pytest.approx(expected, rel=1e-3)
    assert validation_loss(accelerator, model, lambda: True, loader=loader) == {}


def test_scores_are_without_dropout_and_a_stop_restores_the_training_mode(accelerator):
    model = GPT(replace(SHAPE, dropout=0.5)).train()
    asked = []
    task = build_hellaswag(hellaswag_items(400))
    assert task(accelerator, model) == task(accelerator, model)
    results = task(accelerator, model, lambda: asked.append(0) or len(asked) == 3)
    assert results == {}
    assert model.training
    assert len(asked) == 3


def test_items_with_endings_that_do_not_fit_are_skipped():
    items = hellaswag_items(5)
    items[3]["endings"] = ["a" * 70, "b", "c", "d"]
    task = build_hellaswag(items)
    assert "1 items are skipped" in task.notes[0]
    rest = build_hellaswag(items[:3] + items[4:])
    assert task.questions == rest.questions
    assert task.labels == rest.labels


def test_items_are_read_from_json_lines_and_text(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text('{"text": "a\u2028b"}\r\n\r\n{"text": "c"}', encoding="utf-8")
    first, second = read_items(path)
    assert first == (f"{path}, line 1", {"text": "a\u2028b"})
    assert second.place.endswith("line 3")
    text = tmp_path / "items.txt"
    text.write_bytes("the cat\n\nsat on\r\n".encode("utf-8-sig"))  # Windows writes such files
    assert read_items(text) == [(str(text), {"text": "the cat\n\nsat on\r\n"})]


# Models whose tokenizer begins texts with BOS

TEXTS = [make_text(90, seed) for seed in range(8)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder of a model of transformers whose tokenizer adds BOS, and data of its tokens."""
    folder = tmp_path_factory.mktemp("bos")
    tokenizer = own_tokenizer("gemma3_text", TEXTS)
    model = randomized(family_model("gemma3_text", vocab_size=len(tokenizer)))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prepare({"train": TEXTS[:6], "val": TEXTS[6:]}, tokenizer, folder / "data", source="made up")
    return folder


@torch.no_grad()
def window_loss(folder, windows: list[tuple[list[int], int]]) -> float:
    """Returns the mean loss of the last tokens of windows, by a plain loop over transformers."""
    hf = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    nats = []
    for ids, counted in windows:
        logits = hf(torch.tensor([ids[:-1]])).logits[0, -counted:]
        nats += F.cross_entropy(logits, torch.tensor(ids[-counted:]), reduction="none").tolist()
    return sum(nats) / len(nats)


def stream_windows(begins: bool, length: int = 32) -> list[tuple[list[int], int]]:
    """Returns the windows of the val split; each begins with BOS, or inside a document."""
    tokenizer = own_tokenizer("gemma3_text", TEXTS)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = [i for text in TEXTS[6:] for i in [*tokenizer(text).input_ids, eos]]
    rows = [ids[start : start + length + 1] for start in range(0, len(ids) - length, length)]
    return [([bos, *row[1:]] if begins else row, length) for row in rows]


def test_a_run_from_such_a_model_begins_each_window_with_bos(begun, tmp_path, capsys):
    settings = {"init_from": str(begun / "model"), "learning_rate": 0.0, "weight_decay": 0.0}
    settings |= {"max_steps": 2, "save_every": 1, "eval_every": 2, "total_batch_size": 128}
    last = run(tiny_config(begun / "data", tmp_path / "run", **settings))[-1]
    expected = window_loss(begun, stream_windows(True))
    inside = window_loss(begun, stream_windows(False))
    assert abs(expected - inside) > 1e-4
    assert last["val/loss"] == pytest.approx(expected, abs=1e-5)
    assert "each window of text begins with <bos>" in capsys.readouterr().out

    state = tmp_path / "run/checkpoint-1/training_state/state.json"
    assert read_json(state)["bos"] == [0]
    resumed = {"resume_from": str(state.parents[1])} | settings
    again = run(tiny_config(begun / "data", tmp_path / "again", **resumed))[-1]
    assert (again["val/loss"], losses([again])) == (last["val/loss"], losses([last]))

    long = window_loss(begun, stream_windows(True, POSITIONS))
    # A run's model has the windows of the run.
    for folder, loss in ((begun / "model", long), (tmp_path / "run", expected)):
        flags = ["--data_dir", begun / "data", "--output", tmp_path / f"{folder.name}.json"]
        run_recipe("evaluate", "--model", folder, *flags)
        [entry] = read_json(tmp_path / f"{folder.name}.json").values()
        assert entry["results"]["val/loss"] == pytest.approx(loss, abs=1e-5)


def test_a_text_is_read_in_windows_that_begin_with_bos(begun, tmp_path):
    (tmp_path / "text.txt").write_text(TEXTS[0])
    flags = ["--tasks", "text", "--data", tmp_path / "text.txt", "--output", tmp_path / "out.json"]
    run_recipe("evaluate", "--model", begun / "model", *flags)
    [entry] = read_json(tmp_path / "out.json").values()
    [bos, *ids] = own_tokenizer("gemma3_text", TEXTS)(TEXTS[0].strip()).input_ids
    windows = []
    for start in range(0, len(ids), POSITIONS):
        end = min(start + POSITIONS, len(ids))
        windows.append(([bos, *ids[max(0, end - POSITIONS) : end]], end - start))
    assert len(windows) > 1
    assert entry["results"]["text/loss"] == pytest.approx(window_loss(begun, windows), abs=1e-5)
