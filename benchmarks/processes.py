"""Starts the processes that measure: each `Job` has its own caches and peak memory."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """A contestant: what a process does in each turn. `kind` is one of `worker.KINDS`, `shape` has
    fields of a `GPTConfig`.

    The fields from `optimizer` on change the plain loop, which is nanoGPT's by default.
    """

    name: str
    kind: str
    shape: dict = field(default_factory=dict)
    batch_size: int = 1  # sequences of a micro-batch
    accumulation: int = 1  # micro-batches per update
    precision: str = "no"  # "no", "bf16" or "fp16"
    compile: bool = False
    architecture: str = "gpt2"
    data_dir: str = ""
    warmup: int = 2  # updates before the first turn

    recipe: str = ""  # the fields from here to `packed` are those of chat.py
    model: str = ""  # directory
    data: str = ""  # file of conversations or pairs
    length: int = 0  # tokens per window, or of an answer with its prompt
    targets: int = 0  # tokens per update that count in the loss
    lora: int = 0
    packed: bool = False  # TRL's windows are packed

    optimizer: str = "nanogpt"  # "nanogpt", "slow" or "toolkit"
    hand_attention: bool = False  # for this field and the next two see `reference_model.py`
    hand_norm_gelu: bool = False
    stored_mask: bool = False
    chunked_loss: bool = False
    tf32: bool = False
    prefetch: bool = False
    ddp: bool = False

    @property
    def setting(self) -> str:
        """Precision, compilation and texts at once, for the table."""
        words = ["fp32" if self.precision == "no" else self.precision]
        if self.compile:
            words.append("compiled")
        if self.kind in ("generate", "hf_generate"):
            words.append(f"{self.batch_size} at once")
        return ", ".join(words)

    @property
    def tokens(self) -> int:
        """Tokens per update; `targets` if it is given."""
        return self.targets or self.batch_size * self.shape["n_positions"] * self.accumulation


class Process:
    """A running job, which waits for turns. Leaving the context kills it.

    Its files are in `folder`, its stderr in `folder`/log.txt. torchrun starts several `processes`.
    `turn` raises `RuntimeError` with the end of the stderr if the job ends by itself.
    """

    def __init__(self, job: Job, folder: Path, processes: int = 1):
        self.job = job
        self.log = folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={processes}"]
        command += [str(HERE / "worker.py"), json.dumps(asdict(job)), str(folder / "run")]
        # The job sets precision and compilation; HF's Trainer also reads Accelerate's variables.
        env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
        if job.kind in ("toolkit", "chat_recipe"):
            env["ACCELERATE_MIXED_PRECISION"] = job.precision
            env["ACCELERATE_DYNAMO_BACKEND"] = "inductor" if job.compile else "no"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def turn(self, updates: int) -> dict:
        """Makes `updates` updates; returns their `seconds` and the peak `memory` in bytes."""
        print(updates, file=self.process.stdin, flush=True)
        return self.reply()

    def reply(self) -> dict:
        """Waits for the next reply; the first reply follows the warmup."""
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        end = f"ended with exit code {self.process.wait()}"
        raise RuntimeError(f"{self.job.name} {end}: {self.log.read_text().strip()[-4000:]}")

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
