"""Starts the processes that measure: each `Job` has its own caches and peak memory."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


ANSWERS = 8  # of "chat_rl" to each prompt
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Job:
    """One program to measure. `kind` is a key of `worker.KINDS`.

    A field below a comment that names kinds affects these kinds only.
    """

    name: str
    kind: str
    shape: dict = field(default_factory=dict)  # fields of a `GPTConfig`
    batch_size: int = 1  # sequences per micro-batch
    accumulation: int = 1  # micro-batches per update
    precision: str = "no"  # "no", "bf16" or "fp16"
    compile: bool = False
    architecture: str = "gpt2"
    residual_dtype: str = "float32"
    data_dir: str = ""  # folder of token shards
    warmup: int = 2  # updates before the first turn

    # "generate" and "hf_generate"
    new_tokens: int = 0  # per text

    # "chat_recipe", "trl_trainer" and "hf_loop"; for generation, `model` replaces `shape`
    recipe: str = ""  # "chat_sft", "chat_dpo" or "chat_rl"
    model: str = ""  # model directory
    data: str = ""  # file of conversations, pairs or tasks
    length: int = 0  # tokens per window, or per prompt with an answer
    targets: int = 0  # tokens per update that count in the loss
    lora: int = 0  # rank; 0: off
    packed: bool = False  # whether TRL packs the windows

    # "loop", by default nanoGPT's
    optimizer: str = "nanogpt"  # "nanogpt", "slow" or "toolkit"
    hand_attention: bool = False  # `reference_model.py` explains this and the next two
    hand_norm_gelu: bool = False
    stored_mask: bool = False
    chunked_loss: bool = False
    tf32: bool = False
    prefetch: bool = False
    ddp: bool = False

    @property
    def setting(self) -> str:
        """Precision, compilation and, for generation, the batch size: a column of the table."""
        words = ["fp32" if self.precision == "no" else self.precision]
        if self.compile:
            words.append("compiled")
        if self.residual_dtype == "bfloat16":
            words.append("bf16 residual stream")
        if self.new_tokens:
            words.append(f"{self.batch_size} at once")
        return ", ".join(words)

    @property
    def tokens(self) -> int:
        """Tokens per update: new tokens in generation, counted targets in fine-tuning."""
        if self.new_tokens:
            return self.batch_size * self.new_tokens
        if self.targets:
            return self.targets
        return self.batch_size * self.shape["n_positions"] * self.accumulation


class Process:
    """A running job, which waits for turns. Leaving the context kills it.

    Its files are in `folder`, its stderr in `folder`/log.txt. torchrun starts several `processes`.
    """

    def __init__(self, job: Job, folder: Path, processes: int = 1):
        self.job = job
        self.log_path = folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={processes}"]
        command += [str(HERE / "worker.py"), json.dumps(asdict(job)), str(folder / "run")]
        # Drop the caller's ACCELERATE_* variables, which HF's Trainer would read too.
        env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
        if job.kind in ("toolkit", "chat_recipe"):
            env["ACCELERATE_MIXED_PRECISION"] = job.precision
            env["ACCELERATE_DYNAMO_BACKEND"] = "inductor" if job.compile else "no"
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def turn(self, updates: int) -> dict:
        """Makes `updates` updates; returns their `seconds` and the peak `memory` in bytes.

        Raises the errors of `reply`.
        """
        print(updates, file=self.process.stdin, flush=True)
        return self.reply()

    def reply(self) -> dict:
        """Waits for the next reply; the first reply follows the warmup.

        Raises `RuntimeError` with the end of the stderr if the job has ended.
        """
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        exit_code = self.process.wait()
        stderr = self.log_path.read_text().strip()[-4000:]
        raise RuntimeError(f"{self.job.name} ended with exit code {exit_code}: {stderr}")

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
