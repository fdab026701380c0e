"""Runs on several processes."""

import json

import pytest
from conftest import WORDS, as_flags, losses, make_text, metrics, run, tiny_config
from launching import launch

from gpt2_accel.data.prepare import prepare
from gpt2_accel.tokenizer import byte_tokenizer

SCRIPT = "tests/train_script.py"


@pytest.mark.parametrize(("processes", "micro_batch_size"), [(2, 2), (4, 8)])
def test_losses_do_not_depend_on_processes_and_accumulation(
    tiny, tmp_path, processes, micro_batch_size
):
    settings = {"total_batch_size": 8 * 32, "eval_every": 4, "save_every": 4}
    questions = tmp_path / "hellaswag.jsonl"
    with questions.open("w") as file:
        for i in range(7):
            item = {"ctx": WORDS[i], "endings": [*WORDS[i + 7 : i + 9], "a b c d"], "label": i % 3}
            file.write(json.dumps(item) + "\n")
    settings |= {"hellaswag_every": 8, "hellaswag_data": str(questions)}
    alone = run(tiny("alone", micro_batch_size=2, **settings))
    config = tiny("many", micro_batch_size=micro_batch_size, **settings)
    done = launch(SCRIPT, *as_flags(config), processes=processes)
    many = metrics(tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), abs=1e-5)
    evaluated = [name for name in alone[-1] if name.startswith(("val/", "hellaswag/"))]
    assert len(evaluated) == 4 + 6
    for name in evaluated:
        assert many[-1][name] == pytest.approx(alone[-1][name], rel=1e-4)
    assert f"{8 // 2 // processes} micro-batches x {processes} processes" in done.stdout
    said = "micro_batch_size 2 in place of 8: each process has 2 sequences"
    assert done.stdout.count(said) == (micro_batch_size == 8)
    assert done.stdout.count("tokens per update") == 1  # only the main process prints


def test_dropout_differs_between_processes(tmp_path):
    # Both read the same window, and the learning rate is 0: with equal dropout the mean loss would be that of the first.
    prepare({"train": [make_text(20, 0)[:32]]}, byte_tokenizer(), tmp_path / "data", source="text")
    settings = {"dropout": 0.2, "learning_rate": 0.0, "micro_batch_size": 1, "max_steps": 3}
    alone = tiny_config(tmp_path / "data", tmp_path / "alone", total_batch_size=32, **settings)
    config = tiny_config(tmp_path / "data", tmp_path / "both", total_batch_size=64, **settings)
    launch(SCRIPT, *as_flags(config), processes=2)
    for one, both in zip(losses(run(alone)), losses(metrics(tmp_path / "both")), strict=True):
        assert abs(both - one) > 1e-4
