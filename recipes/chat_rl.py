"""Let a chat model practise, by reinforcement learning: rewarded answers become likelier.

    python recipes/chat_rl.py --model runs/chat_sft --data tasks.jsonl
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/chat_rl.py \\
        --model runs/chat_sft --data gsm8k_train.jsonl --reward number --batch_size 64

Data: rows with a `prompt` (a text or messages) and an `answer`, or `question` and `answer`, as in
GSM8K. `--reward` is `number` (the last number of the text is that of the answer), `exact`, or a
function of your own, `FILE.py:FUNCTION`, which takes (row, text) and returns a number, or None to
leave the answer out. One task in 20 is held out, of few tasks one in 5. For each of `--batch_size`
prompts an update samples `--group` answers; the advantage of an answer is its reward less the mean
of its group. docs/chat.md has a trial. If the chat template prints today's date, tasks have `DATE`:
a resume on another day sees the same prompts. Expected: `train/reward` and `solved/reward` rise;
`val/kept` says what the model loses elsewhere.
"""

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, check_ranges, derived, parse_config, setting

if TYPE_CHECKING:
    from gpt2_accel.run import Evaluation, Run

HELD_OUT = 20  # one task in 20, but of few tasks one in 5, up to this number
MOST_HELD_OUT = 200  # tasks
DATE = date(2025, 1, 1)


@dataclass
class ChatRL(TrainConfig):
    data: str | None = setting(None, "file of tasks: .jsonl, .json or .parquet")
    model: str | None = setting(None, "model that practises: run's folder, HF directory or Hub id")
    reward: str = setting("number", "number, exact, or FILE.py:FUNCTION")
    batch_size: int = setting(8, "prompts per update, over all devices")
    group: int = setting(8, "answers to each prompt")
    max_new_tokens: int = setting(128, "longest answer, in tokens")
    scale_rewards: bool = setting(False, "divide advantages by the group's deviation, as GRPO")
    mask_cut: bool = setting(False, "answers that are cut do not count")
    test_every: int = setting(
        20, "interval of the evaluation on held-out tasks, in updates; 0: none"
    )

    output_dir: str = "runs/chat_rl"
    resume_from: str | None = "latest"
    micro_batch_size: int = setting(4, "prompts, with their groups, per device and pass")
    total_batch_size: int = derived("set by batch_size")
    max_steps: int = 100
    learning_rate: float = 1e-6
    lr_schedule: str = "constant"
    warmup_steps: int = 5
    weight_decay: float = 0.0
    beta2: float = 0.99
    eval_every: int = 0
    sample_every: int = 10
    sample_prompts: list[str] = setting([], "prompts that samples answer, besides the tasks")
    save_every: int = 20
    log_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            positive="batch_size max_new_tokens",
            not_negative="test_every",
            above_zero="group",
        )
        if self.group < 2:
            raise ValueError("group must be at least 2: an answer is compared with its group")
        self.init_from = self.init_from or self.model
        if not (self.data and self.init_from):
            raise ValueError("give the tasks by --data FILE and the model by --model")


class AtStart:
    """A callback: makes an evaluation before the first update."""

    def __init__(self, evaluation: "Evaluation"):
        self.evaluation = evaluation

    def on_train_begin(self, run: "Run") -> None:
        if not run.step:
            run.evaluate(self.evaluation)


def with_date(template: str) -> str:
    """Returns a chat template with `DATE` in place of today's date."""
    return re.sub(
        r"""strftime_now\(\s*(?:format\s*=\s*)?(['"])([^'"\\]*)\1\s*,?\s*\)""",
        lambda m: repr(DATE.strftime(m[2])),
        template,
    )


def main() -> None:
    config = parse_config(ChatRL)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.callbacks import Evaluations
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.data import Data
    from gpt2_accel.evals.items import read_items
    from gpt2_accel.hf.convert import local_directory, read_config
    from gpt2_accel.rewards import PolicyGradient, Prompts, Solved, load_reward, read_tasks
    from gpt2_accel.runtime.processes import main_process_first
    from gpt2_accel.tokenizer import load_tokenizer
    from gpt2_accel.train import train

    assert config.data and config.init_from  # checked by ChatRL
    reward = load_reward(config.reward)
    with main_process_first():
        directory = local_directory(verified_directory(config.init_from))
        tokenizer, dated = load_tokenizer(directory), load_tokenizer(directory)
        dated.chat_template = with_date(tokenizer.chat_template or "")
        longest = read_config(directory).n_positions - config.max_new_tokens
        tasks = read_tasks(read_items(config.data), dated, longest, reward)
    held_out = max(len(tasks) // HELD_OUT, min(len(tasks) // 5, HELD_OUT))
    held_out = min(held_out, MOST_HELD_OUT)
    test, practice = tasks[:held_out], tasks[held_out:]
    source = Prompts(practice)
    config.derive(total_batch_size=config.batch_size * source.length)
    gradients = PolicyGradient(
        practice,
        reward,
        group=config.group,
        max_new_tokens=config.max_new_tokens,
        scale_rewards=config.scale_rewards,
        mask_cut=config.mask_cut,
    )
    callbacks: list[object] = []
    if test and config.test_every:
        solved = Solved(test, reward, dated, config.max_new_tokens)
        callbacks += [AtStart(solved), Evaluations([(config.test_every, solved)])]
    data = Data(tokenizer, source, name=f"tasks of {Path(config.data).name}", chat=True)
    train(config, data=data, gradients=gradients, callbacks=callbacks)


if __name__ == "__main__":
    cli.run(main)
