"""Measure how much each optimization speeds up GPT-2's training step on this machine.

    python recipes/speed_ladder.py
    python recipes/speed_ladder.py --micro_batch_size 4                  # a GPU of 16 GB
    python recipes/speed_ladder.py --size tiny --sequence_length 32      # a trial, one minute

The ladder has sixteen steps, from a textbook GPT-2 in fp32, eager, to the toolkit's own settings. Each step keeps the
optimizations before it and is measured in its own process on random tokens: forward, backward, gradient clipping to 1,
update. Steps that the device does not support or has no memory for are marked, and a micro-batch that does not fit is
not kept. Attention alone is measured last.

Prints a table, and writes it to `--output_dir` as Markdown, CSV and a figure: milliseconds, tokens/s, peak memory, MFU
relative to the matrix products measured on this device, the speedup over the previous step, and the A100 figures that
LLMs-from-scratch and build-nanogpt have published. The default is 16 x 1024 tokens on a GPU and 2 x 512 on a CPU (about
ten minutes on 2 idle cores). The figure needs matplotlib.
"""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, parse_config, setting

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from ladder import LADDER_SIZES, run_ladder


@dataclass
class SpeedLadder:
    output_dir: str = setting("runs/speed_ladder", "folder of the table and the figure")
    size: str = setting("gpt2", f"one of {', '.join(LADDER_SIZES)}")
    micro_batch_size: int | None = setting(None, "sequences; default 16, on a CPU 2")
    large_micro_batch_size: int | None = setting(
        None, "sequences in the last steps; default 4 x micro_batch_size"
    )
    sequence_length: int | None = setting(None, "tokens per sequence; default 1024, on a CPU 512")
    accumulation: int | None = setting(
        None, "micro-batches per update in the last steps; default 8, on a CPU 4"
    )
    steps: int | None = setting(None, "measured updates per step; default 20, on a CPU 3")
    warmup: int | None = setting(None, "warmup updates per step; default 5, on a CPU 1")
    attention: list[int] = setting(
        [], "B H T D of attention alone; default 32 8 2048 64, on a CPU 4 8 512 64"
    )

    def __post_init__(self) -> None:
        if self.size not in LADDER_SIZES:
            raise ValueError(
                f"there is no size {self.size!r}: choose one of {', '.join(LADDER_SIZES)}"
            )
        check_ranges(
            self,
            positive="micro_batch_size large_micro_batch_size sequence_length accumulation steps warmup",
        )
        if self.attention and (len(self.attention) != 4 or min(self.attention) < 1):
            raise ValueError(
                f"attention must be four numbers above 0, B H T D, got {self.attention}"
            )
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("the ladder starts its own processes: start it with python")


def main() -> None:
    run_ladder(**asdict(parse_config(SpeedLadder)))


if __name__ == "__main__":
    cli.run(main)
