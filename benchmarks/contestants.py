"""The contestants of `training.py`. Each runs in its own process and makes updates on request.

`python contestants.py JOB`, where JOB is a `Job` as JSON. The process warms up and replies, then reads a number of
updates per line from stdin and writes {"seconds", "memory", …} as a line of JSON to stdout. It exits at the end of
stdin.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
from timing import peak_memory, synchronize, this_device
from training import HF_DEFAULTS, HF_QWEN3, OUR_QWEN3, SWITCHES

from gpt2_accel.device import matmul_flops
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.runtime.signals import end_with_parent

if TYPE_CHECKING:
    from gpt2_accel.config import TrainConfig

# Each contestant imports what it needs inside its function, so that its imports do not use the memory of others.

WARMUP = 2
ENDLESS = 10**7  # updates; the parent process ends the run
LEARNING_RATE, BETA2 = 6e-4, 0.95


@dataclass
class Job:
    """The training job of a contestant; `shape` are fields of a `GPTConfig`, and settings of a `TrainConfig`."""

    contestant: str
    architecture: str
    shape: dict
    batch_size: int
    bf16: bool
    compile: bool
    data_dir: str
    output_dir: str

    @property
    def sequence_length(self) -> int:
        return self.shape["n_positions"]


class Gate:
    """A callback after each update: reports to the parent process, and waits until it requests more updates."""

    def __init__(self, replies: TextIO):
        self.device, self.replies = this_device(), replies
        self.left, self.begun = WARMUP, time.perf_counter()

    def __call__(self, **figures: float) -> None:
        """Counts an update. After the last one requested, replies with its `figures` and waits."""
        self.left -= 1
        if self.left:
            return
        synchronize(self.device)
        seconds = time.perf_counter() - self.begun
        reply = {"seconds": seconds, "memory": peak_memory(self.device), **figures}
        print(json.dumps(reply), file=self.replies, flush=True)
        asked = sys.stdin.readline()
        if not asked:
            os._exit(0)  # works inside any trainer; the parent removes the files
        self.left, self.begun = int(asked), time.perf_counter()


def toolkit(job: Job, gate: Gate) -> None:
    """The toolkit's `train`; precision and compilation come from the environment, as in a launched run."""
    import gpt2_accel.runtime.context as context
    from gpt2_accel.train import train

    class GatedLog(context.RunLog):
        def end_step(self) -> None:
            super().end_step()
            gate()

    context.RunLog = GatedLog
    train(settings(job))


def settings(job: Job) -> "TrainConfig":
    """Returns the settings of the toolkit's run."""
    from gpt2_accel.config import TrainConfig

    return TrainConfig(
        data_dir=job.data_dir,
        output_dir=job.output_dir,
        architecture=job.architecture,
        micro_batch_size=job.batch_size,
        total_batch_size=job.batch_size * job.sequence_length,
        max_steps=ENDLESS,
        learning_rate=LEARNING_RATE,
        beta2=BETA2,
        eval_every=0,
        sample_every=0,
        save_every=0,
        **{name: value for name, value in job.shape.items() if name != "vocab_size"},
    )


def hf_trainer(job: Job, gate: Gate) -> None:
    """`transformers.Trainer` with the transformers model of the same shape, without a KV cache.

    Only the contestant `HF_DEFAULTS` has dropout: the default of `GPT2Config`.
    """
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from gpt2_accel.hf.convert import conversion
    from gpt2_accel.models.architectures import configured_shape

    class GateCallback(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            gate()

    on_cpu = gate.device.type == "cpu"
    shape = configured_shape(settings(job), job.shape["vocab_size"])
    config = conversion(shape).hf_config(shape, end_of_text=None)
    config.use_cache = False
    if job.contestant == HF_DEFAULTS:
        config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = GPT2Config().attn_pdrop
    arguments = TrainingArguments(
        output_dir=job.output_dir,
        use_cpu=on_cpu,
        bf16=job.bf16,
        torch_compile=job.compile,
        per_device_train_batch_size=job.batch_size,
        max_steps=ENDLESS,
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        adam_beta2=BETA2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
    )
    model = AutoModelForCausalLM.from_config(config)
    Trainer(model, arguments, train_dataset=Windows(job), callbacks=[GateCallback()]).train()


class Windows(torch.utils.data.Dataset):
    """The windows of the training split, in the Trainer's format."""

    def __init__(self, job: Job):
        from gpt2_accel.data.shards import TokenStream

        self.stream, self.length = TokenStream(job.data_dir, "train"), job.sequence_length

    def __len__(self) -> int:
        return self.stream.tokens // self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = torch.from_numpy(self.stream.read(number * self.length, self.length))
        return {"input_ids": window, "labels": window}


def plain_loop(job: Job, gate: Gate) -> None:
    """nanoGPT's loop: the loss uses all logits at once, and the vocabulary includes the padding, as in nanoGPT."""
    from nanogpt import plain_optimizer, update
    from reference_model import PlainLoss

    shape = GPTConfig(**job.shape)
    model = GPT(GPTConfig(**{**job.shape, "vocab_size": shape.padded_vocab_size})).to(gate.device)
    if gate.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    optimizer = plain_optimizer(model, LEARNING_RATE, BETA2)
    loss_of = compiled(PlainLoss(model), job)
    for batch in batches(job, gate):
        update(loss_of, model, optimizer, batch, job.bf16)
        gate()


def bare_loop(job: Job, gate: Gate) -> None:
    """The toolkit's model, kernels, optimizer and batches, in a loop without Accelerate, log or anomaly guard."""
    from nanogpt import update

    from gpt2_accel.optim import build_optimizer
    from gpt2_accel.runtime.accelerator import tune

    model = GPT(GPTConfig(**job.shape)).to(gate.device)
    tune(gate.device, "bf16" if job.bf16 else "no", job.compile, deterministic=False)
    optimizer = build_optimizer(model, lr=LEARNING_RATE, betas=(0.9, BETA2))
    loss_of = compiled(model, job)
    for batch in batches(job, gate):
        update(loss_of, model, optimizer, batch, job.bf16)
        gate()


def matmul(job: Job, gate: Gate) -> None:
    """No training: measures the speed of matrix products in each turn."""
    on_cpu = gate.device.type == "cpu"
    while True:
        dtype = torch.bfloat16 if job.bf16 else torch.float32
        gate(flops=matmul_flops(gate.device, dtype, 2048 if on_cpu else 8192, repeats=10))


def compiled(module: torch.nn.Module, job: Job) -> Callable[..., torch.Tensor]:
    """Compiles `module` if `job.compile` is set."""
    return torch.compile(module) if job.compile else module


def batches(job: Job, gate: Gate) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the toolkit's batches, one per update, without end."""
    from gpt2_accel.data.loader import TrainLoader, open_split

    loader = TrainLoader(
        open_split(job.data_dir, "train"),
        sequence_length=job.sequence_length,
        micro_batch_size=job.batch_size,
        seed=1337,
        device=gate.device,
    )
    for step in itertools.count():
        yield from loader.update(step * job.batch_size, job.batch_size)


CONTESTANTS: dict[str, Callable[[Job, Gate], None]] = {
    **dict.fromkeys(("gpt2_accel", *SWITCHES, OUR_QWEN3), toolkit),
    **dict.fromkeys(("HF Trainer", HF_DEFAULTS, HF_QWEN3), hf_trainer),
    "plain loop": plain_loop,
    "bare loop": bare_loop,
    "matmul": matmul,
}


def main() -> None:
    end_with_parent(signal.SIGKILL)
    # Send the stdout of libraries to stderr, so that stdout has replies only.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    Path(job.output_dir).mkdir(parents=True)
    CONTESTANTS[job.contestant](job, Gate(replies))


if __name__ == "__main__":
    main()
