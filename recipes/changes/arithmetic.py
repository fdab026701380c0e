"""Two-digit sums that are made on the fly, without prepared data; exact match by generation.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/arithmetic.py

Window i is a sum, `07+35=042`, a function of i: ranks, micro-batches and a resume see the same
sums. Only results count in the loss. The validation sums are drawn with another seed, and
`sums/exact_match` is the share of 100 sums that the model answers right. A sum is also a
conversation in the tokenizer's chat template: the user writes `07+35=`, the assistant `042`.

`--forgets 0.7` writes a text by somebody who forgets 7 of 10 carries from the ones to the tens:
`07+35=032`. A model that learns it exactly answers each sum without this carry right, which is 55%
of all, and gives the likelier, wrong answer to the others. `make rl` begins with such a model.

Tokens: 256 sums x 9 tokens per update; 300 updates, three times as many as the model needs.
"""

import string
from dataclasses import dataclass

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import numpy as np

from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.data import Data
from gpt2_accel.generation.sampling import Sampling
from gpt2_accel.run import Run
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, char_tokenizer
from gpt2_accel.train import train

# An answer ends with the EOS token.
TEMPLATE = """\
{%- for message in messages -%}
    {{- message['content'] -}}
    {%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
"""


@dataclass
class Arithmetic(TrainConfig):
    forgets: float = setting(0.0, "share of the carries to the tens that the text forgets")

    output_dir: str = "runs/arithmetic"
    resume_from: str | None = "latest"
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 128
    n_positions: int = 10
    micro_batch_size: int = 256
    total_batch_size: int = 256 * 9
    max_steps: int = 300
    optimizer: str = "muon"
    learning_rate: float = 2e-2
    lr_schedule: str = "linear"
    warmup_steps: int = 10
    eval_every: int = 50
    sample_every: int = 0


class Sums:
    """A source: window i is a sum."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, size: int, forgets: float):
        self.tokenizer = tokenizer
        self.seed = seed
        self.size = size
        self.forgets = forgets

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng((self.seed, i))
        a, b = draw.integers(100, size=2)
        forgotten = a % 10 + b % 10 >= 10 and draw.random() < self.forgets
        result = a + b - 10 * forgotten
        ids = self.tokenizer.encode(f"{a:02d}+{b:02d}={result:03d}{self.tokenizer.eos_token}")
        return np.array(ids[:-1]), np.array([-100] * 5 + ids[6:])  # the result and the end count

    def counts(self, i: int) -> int:
        return 4


class ExactMatch:
    def on_step_end(self, run: Run, skipped: bool) -> None:
        if run.due(run.config.eval_every):
            run.evaluate(lambda *_: self.score(run))

    def score(self, run: Run) -> dict[str, float]:
        pairs = np.random.default_rng(2).integers(100, size=(100, 2))
        prompts = [f"{a:02d}+{b:02d}=" for a, b in pairs]
        written = run.generate(prompts, Sampling(4, temperature=0))
        right = [c.text == f"{a + b:03d}" for c, (a, b) in zip(written, pairs, strict=False)]
        return {"sums/exact_match": float(np.mean(right))} if right else {}


def sums(config: Arithmetic) -> Data:
    tokenizer = char_tokenizer(string.printable)  # chat_sft.py tries a template with words
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = TEMPLATE
    train = Sums(tokenizer, 0, 2**40, config.forgets)
    val = Sums(tokenizer, 1, 512, config.forgets)
    return Data(tokenizer, train, val, name="two-digit sums", chat=True)


def main() -> None:
    train(parse_config(Arithmetic), data=sums, callbacks=[ExactMatch()])


if __name__ == "__main__":
    cli.run(main)
