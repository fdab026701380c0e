"""Runs on several processes."""

import json

import pytest
from conftest import WORDS, as_flags, losses, metrics, run
from launching import launch

SCRIPT = "tests/train_script.py"


def test_losses_do_not_depend_on_processes_and_accumulation(tiny, tmp_path):
    """Alone with accumulation, and on four processes, for which the micro-batch is too large."""
    settings = {"total_batch_size": 8 * 32, "eval_every": 4, "save_every": 4}
    questions = tmp_path / "hellaswag.jsonl"
    with questions.open("w") as file:
        for i in range(7):
            item = {"ctx": WORDS[i], "endings": [*WORDS[i + 7 : i + 9], "a b c d"], "label": i % 3}
            file.write(json.dumps(item) + "\n")
    settings |= {"hellaswag_every": 8, "hellaswag_data": str(questions)}
    alone = run(tiny("alone", micro_batch_size=2, **settings))
    config = tiny("many", micro_batch_size=8, **settings)
    done = launch(SCRIPT, *as_flags(config), processes=4)
    many = metrics(tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), abs=1e-5)
    evaluated = [name for name in alone[-1] if name.startswith(("val/", "hellaswag/"))]
    assert len(evaluated) == 4 + 6
    for name in evaluated:
        assert many[-1][name] == pytest.approx(alone[-1][name], rel=1e-4)
    # Only the main process prints, plain lines in a pipe.
    assert "1 micro-batches x 4 processes" in done.stdout
    assert done.stdout.count("micro_batch_size 2 in place of 8") == 1
    assert done.stdout.count("parameters on 4 x cpu, fp32") == 1
    assert "\r" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("training: ")]
    assert [line[:13] for line in lines] == ["training: 0%,", "training: 100"]
