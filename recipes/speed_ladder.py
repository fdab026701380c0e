"""Measure how much each optimization speeds up GPT-2's training step on this machine.

    python recipes/speed_ladder.py
    python recipes/speed_ladder.py --micro_batch_size 4                  # a GPU of 16 GB
    python recipes/speed_ladder.py --size tiny --sequence_length 32      # a trial, one minute

The ladder has sixteen steps, from a textbook GPT-2 in fp32, eager, to the settings of this toolkit.
Each step keeps the optimizations before it. A process of its own measures it on random tokens:
forward, backward, gradient clipping to 1, update. The table marks steps that the device does not
support or that need too much memory; a micro-batch that does not fit is not kept. The default is
16 x 1024 tokens on a GPU and 2 x 512 on a CPU (about ten minutes on 2 idle cores).

The recipe prints a table of tokens/s, peak memory, the speedup over the previous step, and the A100
results that LLMs-from-scratch and build-nanogpt have published. It writes the results into
`--output_dir`, as `cpu/ladder.json` or `cuda/ladder.json`.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, parse_config, setting

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny")


@dataclass
class SpeedLadder:
    output_dir: str = setting("runs/speed_ladder", "folder of the results")
    size: str = setting("gpt2", f"model size, one of {', '.join(SIZES)}")
    micro_batch_size: int | None = setting(None, "sequences; default 16, or 2 on a CPU")
    sequence_length: int | None = setting(
        None, "tokens per sequence; default 1024, or 512 on a CPU"
    )
    steps: int | None = setting(None, "updates to measure per step; default 20, or 3 on a CPU")

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"there is no size {self.size!r}: choose one of {', '.join(SIZES)}")
        check_ranges(self, positive="micro_batch_size sequence_length steps")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("the ladder starts its own processes: start it with python")


def main() -> None:
    config = parse_config(SpeedLadder)
    from ladder import run_ladder
    from results import write_result
    from table import table

    Path(config.output_dir).mkdir(parents=True, exist_ok=True)  # fails before the measurements
    measurements = run_ladder(
        config.size, config.micro_batch_size, config.sequence_length, config.steps
    )
    print(table(measurements))
    write_result("ladder", measurements, config.output_dir)


if __name__ == "__main__":
    cli.run(main)
