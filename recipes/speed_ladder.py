"""How fast is training here, and what makes it so? GPT-2's step, one improvement after the other.

    python recipes/speed_ladder.py
    python recipes/speed_ladder.py --micro_batch_size 4                  # a GPU of 16 GB
    python recipes/speed_ladder.py --size tiny --sequence_length 32      # a try, in a minute

Begins with GPT-2 as books write it, in fp32, eager, and ends with what the toolkit runs: sixteen steps, each
of which keeps those before it, each measured in a process of its own on made-up tokens. A step is forward,
backward, clipping to 1, update. What the device lacks, or has no memory for, is marked so, and a micro-batch
that does not fit is not kept. Then attention alone.

Prints a table, and writes it to `--output_dir` as Markdown, CSV and a picture: milliseconds, tokens/s, peak
memory, MFU against the matrix products measured on this device, the gain over the step before, beside the
figures that LLMs-from-scratch and build-nanogpt have published for an A100. A GPU takes 16 x 1024 tokens, a
CPU 2 x 512, which is meant to end in about ten minutes on 2 idle cores. Needs matplotlib: pip install
'gpt2_accel[report]'.
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
    output_dir: str = setting("runs/speed_ladder", "where the table and the picture go")
    size: str = setting("gpt2", f"one of {', '.join(LADDER_SIZES)}")
    micro_batch_size: int | None = setting(None, "sequences; default 16, on a CPU 2")
    large_micro_batch_size: int | None = setting(None, "of the last steps; default 4 times that")
    sequence_length: int | None = setting(None, "tokens of a sequence; default 1024, on a CPU 512")
    accumulation: int | None = setting(
        None, "micro-batches of the last steps; default 8, on a CPU 4"
    )
    steps: int | None = setting(None, "measured of each; default 20, on a CPU 3")
    warmup: int | None = setting(None, "steps before them; default 5, on a CPU 1")
    attention: list[int] = setting(
        [], "B, H, T, D of attention alone; default 32 8 2048 64, on a CPU 4 8 512 64"
    )

    def __post_init__(self) -> None:
        if self.size not in LADDER_SIZES:
            raise ValueError(f"there is no size {self.size!r}: choose of {', '.join(LADDER_SIZES)}")
        check_ranges(
            self,
            positive="micro_batch_size large_micro_batch_size sequence_length accumulation steps warmup",
        )
        if self.attention and (len(self.attention) != 4 or min(self.attention) < 1):
            raise ValueError(
                f"attention has to be four numbers, B, H, T and D, not {self.attention}"
            )
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("the ladder starts its processes itself: begin it with python")


def main() -> None:
    run_ladder(**asdict(parse_config(SpeedLadder)))


if __name__ == "__main__":
    cli.run(main)
