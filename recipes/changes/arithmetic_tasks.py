"""Two-digit sums as files: solutions for `chat_sft.py`, tasks for `chat_rl.py`.

    python recipes/changes/arithmetic_tasks.py --output data/sums
    make rl    # a base model by arithmetic.py, then practice by reward alone

`solutions.jsonl` has 100 conversations, `tasks.jsonl` 3,000 other sums with their answers, and
`held_out.jsonl` 500 more.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.runtime.files import write_file

SIZES = {"solutions": 100, "tasks": 3000, "held_out": 500}


@dataclass
class Tasks:
    output: str = setting("data/sums", "folder to write")


def main() -> None:
    folder = Path(parse_config(Tasks).output)
    numbers = random.Random(3).sample(range(100 * 100), sum(SIZES.values()))
    for name, size in SIZES.items():
        rows = []
        for a, b in (divmod(numbers.pop(), 100) for _ in range(size)):
            prompt, answer = f"{a:02d}+{b:02d}=", f"{a + b:03d}"
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            task = {"prompt": prompt, "answer": answer}
            rows.append({"messages": turns} if name == "solutions" else task)
        write_file(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    cli.run(main)
