"""Two-digit sums that are made on the fly, without prepared data; exact match by generation.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/arithmetic.py \\
        --n_layer 2 --n_head 4 --n_embd 128 --n_positions 79 --total_batch_size 2528 \\
        --micro_batch_size 32 --max_steps 1500 --warmup_steps 50 --learning_rate 1e-3 \\
        --eval_every 250 --sample_every 0 --output_dir runs/arithmetic

A window has eight sums, `07+35=042`, and only their results count in the loss. Window i is a
function of i, so ranks, micro-batches and a resume see the same sums. The validation sums are drawn
with another seed. `sums/exact_match` is the share of 100 of them that the model answers.
"""

import string

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import numpy as np

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data import Data
from gpt2_accel.generation.sampling import Sampling
from gpt2_accel.run import Run
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, char_tokenizer
from gpt2_accel.train import train


class Sums:
    """A source: window i has eight sums."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, size: int):
        self.tokenizer = tokenizer
        self.seed = seed
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = np.random.default_rng((self.seed, i)).integers(100, size=(8, 2))
        text = "".join(f"{a:02d}+{b:02d}={a + b:03d}\n" for a, b in pairs)
        ids = np.array(self.tokenizer.encode(text))
        is_result = np.arange(len(ids)) % 10 >= 6  # the digits after "=", and the line end
        return ids[:-1], np.where(is_result, ids, -100)[1:]

    def counts(self, i: int) -> int:
        return 8 * 4


class ExactMatch:
    def on_step_end(self, run: Run, skipped: bool) -> None:
        if run.due(run.config.eval_every):
            run.evaluate(lambda *_: self.score(run))

    def score(self, run: Run) -> dict[str, float]:
        pairs = np.random.default_rng(2).integers(100, size=(100, 2))
        prompts = [f"{a:02d}+{b:02d}=" for a, b in pairs]
        written = run.generate(prompts, Sampling(4, temperature=0))
        right = [c.text == f"{a + b:03d}\n" for c, (a, b) in zip(written, pairs, strict=False)]
        return {"sums/exact_match": float(np.mean(right))} if right else {}


def sums(config: TrainConfig) -> Data:
    tokenizer = char_tokenizer(string.printable)  # a chat template needs letters
    train, val = Sums(tokenizer, 0, 2**40), Sums(tokenizer, 1, 64)
    return Data(tokenizer, train, val, name="two-digit sums")


def main() -> None:
    train(parse_config(TrainConfig), data=sums, callbacks=[ExactMatch()])


if __name__ == "__main__":
    cli.run(main)
