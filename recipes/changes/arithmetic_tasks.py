"""Two-digit sums as files of tasks for `chat_rl.py`.

    python recipes/changes/arithmetic_tasks.py --output data/sums
    make rl    # a base model by arithmetic.py, then practice by reward alone

`tasks.jsonl` has 3,000 sums with their answers, `held_out.jsonl` 500 others.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.runtime.files import write_file

SIZES = {"tasks": 3000, "held_out": 500}


@dataclass
class Tasks:
    output: str = setting("data/sums", "folder to write")


def main() -> None:
    folder = Path(parse_config(Tasks).output)
    numbers = random.Random(3).sample(range(100 * 100), sum(SIZES.values()))
    for name, size in SIZES.items():
        text = ""
        for a, b in (divmod(numbers.pop(), 100) for _ in range(size)):
            text += json.dumps({"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}) + "\n"
        write_file(folder / f"{name}.jsonl", text)


if __name__ == "__main__":
    cli.run(main)
