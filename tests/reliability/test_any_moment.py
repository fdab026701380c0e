"""A run that is killed or stopped at any moment equals one that was not disturbed."""

import random
import signal

import pytest
from conftest import chat_rows, long, pair_rows, weights_digest, write_lines
from interrupted import KILLING_SCRIPT, repeatable
from launching import python

# Evaluations, samples and saves are due at different updates, and together.
FLAGS = (
    "--eval_every 2 --sample_every 3 --save_every 4 --max_steps 6 --log_every 1 --keep_last 1 "
    "--resume_from latest --micro_batch_size 2 --learning_rate 1e-3 --sample_prompts Why? "
    "--sample_tokens 4"
)
KINDS = {
    "tests/seams_script.py": "--n_layer 1 --n_head 2 --n_embd 32 --total_batch_size 128",
    "recipes/chat_sft.py": "--sequence_length 64 --total_batch_size 256",
    "recipes/chat_dpo.py": "--batch_size 4",
    "recipes/chat_rl.py": (
        "--batch_size 4 --group 2 --max_new_tokens 6 --reward tests/reward_script.py:letters "
        "--test_every 2 --eval_every 0"
    ),
}
ALWAYS = {"tests/seams_script.py", "recipes/chat_rl.py"}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=long)])
@pytest.mark.parametrize(
    "script", [pytest.param(kind, marks=() if kind in ALWAYS else long) for kind in KINDS]
)
def test_a_run_ended_at_any_moment_equals_an_undisturbed_one(
    script, number, chat_model, tmp_path, times
):
    rows = chat_rows(24) if "sft" in script else pair_rows(24)
    file = write_lines(tmp_path / "rows.jsonl", rows)
    flags = f"{script} {FLAGS} {KINDS[script]}"
    if script.startswith("recipes"):
        flags += f" --model {chat_model} --data {file}"

    def run(moment, folder):
        words = f"{flags} --output_dir {folder}".split()
        env = {"SIGNAL": str(int(number)), "CASE": "source", "ACCELERATE_USE_CPU": "true"}
        return python(KILLING_SCRIPT, moment, "", *words, fails=None if moment else False, **env)

    whole = tmp_path / "whole"
    moments = range(1, int(run(0, whole).stderr.split()[-1]))
    for moment in random.Random(f"{script}{number}").sample(moments, times(1, 20)):
        folder = tmp_path / str(moment)
        run(moment, folder)
        run(0, folder)
        assert weights_digest(folder) == weights_digest(whole), moment
        assert repeatable(folder) == repeatable(whole), moment
        assert not list(folder.rglob(".*.partial")), moment
