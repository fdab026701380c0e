"""Runs on several processes."""

import pytest
from conftest import as_flags, hellaswag_items, losses, metrics, run, write_lines
from launching import launch


def test_losses_do_not_depend_on_processes_and_accumulation(tiny, tmp_path):
    """Alone with accumulation, and on four processes, for which the micro-batch is too large."""
    questions = write_lines(tmp_path / "hellaswag.jsonl", hellaswag_items(7))
    settings = {"total_batch_size": 8 * 32, "eval_every": 3, "n_positions": 128}
    settings |= {
        "sequence_length": 32,
        "hellaswag_every": 3,
        "max_steps": 3,
        "hellaswag_data": str(questions),
    }
    alone = run(tiny("alone", micro_batch_size=2, **settings))
    flags = as_flags(tiny("many", micro_batch_size=8, **settings))
    done = launch("tests/train_script.py", *flags, processes=4)
    many = metrics(tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), abs=1e-5)
    evaluated = [name for name in alone[-1] if name.startswith(("val/", "hellaswag/"))]
    assert len(evaluated) == 5 + 9
    for name in evaluated:
        assert many[-1][name] == pytest.approx(alone[-1][name], rel=1e-4)
    # Only the main process prints, plain lines in a pipe.
    assert done.stdout.count("parameters on 4 x cpu, fp32") == 1
    assert "\r" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("training: ")]
    assert [line[:13] for line in lines] == ["training: 0%,", "training: 100"]
