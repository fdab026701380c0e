"""Progress as plain lines in a pipe."""

import re

from conftest import make_text, run, run_recipe

from gpt2_accel.data.shards import read_manifest
from gpt2_accel.runtime import progress


def test_epochs_give_the_number_of_updates(tiny, capsys, tmp_path):
    config = tiny("run", epochs=0.2, save_every=0)
    run(config)
    tokens = read_manifest(config.data_dir)["splits"]["train"]["tokens"]
    updates = round(0.2 * tokens / config.total_batch_size)
    assert f"updates 0 to {updates}: " in capsys.readouterr().out


def test_long_tasks_print_progress_in_a_pipe(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "PAUSE", 0)
    text = tmp_path / "a.txt"
    text.write_text(make_text(2000, 0))
    run_recipe("prepare_data", "text", text, "--tokenizer", "bytes", "--data_dir", tmp_path / "d")
    assert re.search(r"tokenizing: 100%.* \d.*k?B/s", capsys.readouterr().err)
    logged = run(tiny("run", log_every=4, max_steps=6, eval_every=6))
    shown = capsys.readouterr().err
    assert "evaluating val: 100%" in shown
    assert re.search(r"training: 83%, 5/6 \[.*<.*, loss=[\d.]+, lr=[\d.e-]+, tok/s=", shown)
    assert [line["step"] for line in logged if "train/loss" in line] == [1, 4, 6]
