"""Starts the processes of the benchmarks. A `Job` runs in `worker.py`, with its own caches and peak memory.

Does not import torch: on Linux a process inherits the peak memory of its parent.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
# Signs of a process that ran out of memory: of torch on CUDA, torch on a CPU, Python, and the system.
OUT_OF_MEMORY = ("OutOfMemoryError", "can't allocate memory", "MemoryError", "SIGKILL")


@dataclass(frozen=True)
class Job:
    """A measurement. `kind` is one of `worker.KINDS`, `shape` are fields of a `GPTConfig`.

    `turns` are the numbers of updates to time; None reads them from stdin, one per line. The options after it are those
    of a plain loop, which otherwise is nanoGPT's.
    """

    kind: str
    shape: dict = field(default_factory=dict)
    batch_size: int = 1  # sequences
    precision: str = "no"  # "no", "bf16" or "fp16"
    compile: bool = False
    architecture: str = "gpt2"
    dropout: bool = False  # the default of HF's `GPT2Config`
    data_dir: str = ""  # folder of shards; without it a plain loop makes random tokens
    output_dir: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    attention: list[int] = field(default_factory=list)  # B, H, T, D of attention alone
    warmup: int = 2  # updates
    turns: list[int] | None = None

    accumulation: int = 1
    optimizer: str = "nanogpt"  # "nanogpt", "slow" or "toolkit"
    hand_attention: bool = False  # this and the next two: see `reference_model.py`
    hand_norm_gelu: bool = False
    stored_mask: bool = False
    chunked_loss: bool = False
    tf32: bool = False
    tuned: bool = False  # the toolkit's settings of torch and of its kernels
    prefetch: bool = False
    ddp: bool = False

    def command(self, processes: int = 1) -> list[str]:
        """Returns the command that runs the job, with torchrun if there are several processes."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        script = [str(HERE / "worker.py"), json.dumps(asdict(self))]
        return [sys.executable, *(launcher if processes > 1 else []), *script]


def run_job(job: Job, processes: int = 1) -> dict:
    """Runs a job; returns its last reply, with the `seconds` of all turns, or {"problem": message}."""
    done = subprocess.run(job.command(processes), capture_output=True, text=True)
    if done.returncode == 0:
        replies = [json.loads(line) for line in done.stdout.splitlines()]
        return replies[-1] | {"seconds": [reply["seconds"] for reply in replies[1:]]}
    if done.returncode == -9 or any(sign in done.stderr for sign in OUT_OF_MEMORY):
        return {"problem": "not enough memory"}
    print(done.stderr, file=sys.stderr)
    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return {"problem": f"failed: {last}"}


class Process:
    """A job that waits for turns, with its stderr in `folder`. Leaving the context kills the process.

    Raises `RuntimeError` with the end of its stderr if it exits by itself.
    """

    def __init__(self, name: str, job: Job, folder: Path):
        self.name, self.log = name, folder / "log.txt"
        folder.mkdir(parents=True)
        # Accelerate's variables are part of the job, as HF's Trainer reads them too.
        outside = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                job.command(), env=outside | job.environment, stderr=log, **pipes
            )

    def turn(self, updates: int) -> dict:
        """Requests `updates` updates; returns their seconds and the process's peak memory in bytes."""
        self.process.stdin.write(f"{updates}\n")
        self.process.stdin.flush()
        return self.reply()

    def reply(self) -> dict:
        """Waits for the next reply; the first reply follows the warmup."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-2000:]}")
        return json.loads(line)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def python(*arguments: str | Path, **environment: str) -> None:
    """Runs Python in the project's root. Raises `RuntimeError` with the end of its stderr if it fails."""
    command = [sys.executable, *map(str, arguments)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
