"""The process that measures: `python worker.py JOB`, where JOB is a `Job` as JSON.

It warms up and replies, then makes the updates of each turn and replies {"seconds", "memory", …}, a line of JSON on
stdout. It exits after the last turn. Jobs without updates reply once.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
import torch.nn.functional as F
from nanogpt import Batch, plain_optimizer, plain_update, random_batches
from processes import Job
from reference_model import PlainLoss, slow_gpt, standard_attention
from timing import peak_memory, synchronize, this_device
from torch import nn

from gpt2_accel.device import DTYPES, has_bf16, inductor_problem, matmul_flops
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.optim import build_optimizer
from gpt2_accel.runtime.signals import end_with_parent

if TYPE_CHECKING:
    from gpt2_accel.config import TrainConfig

# A job imports other libraries inside its function, so that they do not use the memory of other jobs.

ENDLESS = 10**7  # updates; the gate ends the run
LEARNING_RATE, BETA2 = 6e-4, 0.95


class Gate:
    """A callback after each update: replies after the last update of a turn, and waits for the next turn."""

    def __init__(self, job: Job, replies: TextIO):
        self.device, self.replies = this_device(), replies
        self.turns = map(int, sys.stdin) if job.turns is None else iter(job.turns)
        self.left, self.begun = job.warmup, time.perf_counter()

    def __call__(self, **figures: float | torch.Tensor) -> None:
        """Counts an update. After the last one of a turn, replies with its `figures`; exits after the last turn."""
        self.left -= 1
        if self.left:
            return
        synchronize(self.device)
        seconds, memory = time.perf_counter() - self.begun, peak_memory(self.device)
        values = {name: float(value) for name, value in figures.items()}
        self.reply(seconds=seconds, memory=memory, **values)
        self.left = next(self.turns, 0)
        if not self.left:
            os._exit(0)  # works inside any trainer; the parent removes the files
        self.begun = time.perf_counter()

    def reply(self, **figures: object) -> None:
        """Writes a reply, on the main process only."""
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(figures), file=self.replies, flush=True)


def toolkit(job: Job, gate: Gate) -> None:
    """The toolkit's `train`; precision and compilation come from the environment, as in a launched run."""
    from gpt2_accel.runtime.context import RunContext
    from gpt2_accel.train import train

    end_step = RunContext.end_step

    def gated(run: RunContext) -> None:
        end_step(run)
        gate()

    RunContext.end_step = gated
    train(settings(job))


def settings(job: Job) -> "TrainConfig":
    """Returns the settings of the toolkit's run."""
    from gpt2_accel.config import TrainConfig

    return TrainConfig(
        data_dir=job.data_dir,
        output_dir=job.output_dir,
        architecture=job.architecture,
        micro_batch_size=job.batch_size,
        total_batch_size=job.accumulation * job.batch_size * job.shape["n_positions"],
        max_steps=ENDLESS,
        learning_rate=LEARNING_RATE,
        beta2=BETA2,
        eval_every=0,
        sample_every=0,
        save_every=0,
        **{name: value for name, value in job.shape.items() if name != "vocab_size"},
    )


def hf_trainer(job: Job, gate: Gate) -> None:
    """`transformers.Trainer` with the transformers model of the same shape, without a KV cache."""
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
    config = conversion(shape).hf_config(shape, {"bos_token_id": None, "eos_token_id": None})
    config.use_cache = False
    if job.dropout:
        config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = GPT2Config().attn_pdrop
    arguments = TrainingArguments(
        output_dir=job.output_dir,
        use_cpu=on_cpu,
        bf16=job.precision == "bf16",
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
        from gpt2_accel.data.stream import TokenStream

        self.stream, self.length = TokenStream(job.data_dir, "train"), job.shape["n_positions"]

    def __len__(self) -> int:
        return self.stream.tokens // self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = torch.from_numpy(self.stream.read(number * self.length, self.length))
        return {"input_ids": window, "labels": window}


def loop(job: Job, gate: Gate) -> None:
    """A plain loop, without Accelerate, log or anomaly guard."""
    if job.ddp:
        if torch.accelerator.is_available():  # gloo on a CPU, for the tests
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group()
    if job.tf32 and gate.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if job.tuned:
        from gpt2_accel.runtime.accelerator import tune

        tune(gate.device, job.precision, job.compile, deterministic=False)
    torch.manual_seed(1337)
    model = build_model(job).to(gate.device)
    if job.optimizer == "toolkit":
        optimizer = build_optimizer(model, lr=LEARNING_RATE, betas=(0.9, BETA2))
    else:  # "slow" updates each tensor with separate operations
        options = {"fused": False, "foreach": False} if job.optimizer == "slow" else {}
        optimizer = plain_optimizer(model, LEARNING_RATE, BETA2, **options)
    if job.ddp:
        model = nn.parallel.DistributedDataParallel(model)
    if job.compile:
        model = torch.compile(model)
    torch.manual_seed(1337)  # equal tokens for all models
    update = plain_update(
        model, optimizer, batches(job, gate), job.precision, job.accumulation, job.prefetch
    )
    while True:
        gate(loss=update())


def build_model(job: Job) -> nn.Module:
    """Builds a module that maps (input_ids, targets), both (B, T) int64, to the loss in nats."""
    config = GPTConfig(**job.shape)
    if job.hand_attention:
        model = slow_gpt(config, stored_mask=job.stored_mask, hand_norm_gelu=job.hand_norm_gelu)
        return PlainLoss(model)
    return GPT(config) if job.chunked_loss else PlainLoss(GPT(config))


def batches(job: Job, gate: Gate) -> Iterator[Batch]:
    """Yields batches on the device without end: the toolkit's from shards, or of random tokens in host memory."""
    T = job.shape["n_positions"]
    if not job.data_dir:
        tokens = min(job.shape["vocab_size"], 50257)  # equal for a vocabulary with padding
        text = torch.randint(tokens, (2**20,))
        yield from random_batches(text, job.batch_size, T, gate.device, pinned=job.prefetch)
    from gpt2_accel.data.loader import TrainLoader, open_split

    split = open_split(job.data_dir, "train")
    options = {"seed": 1337, "device": gate.device}
    loader = TrainLoader(split, sequence_length=T, micro_batch_size=job.batch_size, **options)
    for step in itertools.count():
        for batch in loader.update(step * job.batch_size, job.batch_size):
            yield batch.input_ids, batch.targets


def attention(job: Job, gate: Gate) -> None:
    """Forward and backward of causal attention alone, by hand or by SDPA."""
    options = {"dtype": DTYPES.get(job.precision, torch.float32), "device": gate.device}
    inputs = [torch.randn(job.attention, requires_grad=True, **options) for _ in "qkv"]
    grad = torch.randn(job.attention, **options)
    while True:
        if job.hand_attention:
            y = standard_attention(*inputs)
        else:
            y = F.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(y, inputs, grad)
        gate()


def matmul(job: Job, gate: Gate) -> None:
    """No training: measures the speed of matrix products in each turn."""
    while True:
        gate(flops=matrix_rate(gate.device, job.precision))


def matrix_rate(device: torch.device, precision: str) -> float:
    """Returns the FLOP/s of the product of two large square matrices."""
    dtype = DTYPES.get(precision, torch.float32)
    return matmul_flops(device, dtype, 2048 if device.type == "cpu" else 8192, repeats=10)


def data(job: Job, gate: Gate) -> None:
    """Writes shards of random tokens; replies with what `training.py` has to know of the device and the shape."""
    from synthetic_data import random_shards

    from gpt2_accel.estimate.flops import flops_per_token

    config = GPTConfig(**job.shape)
    random_shards(job.data_dir, config.vocab_size, 2**20)  # more tokens than any job reads
    gate.reply(
        cuda=gate.device.type == "cuda",
        bf16=has_bf16(gate.device),
        flops_per_token=flops_per_token(config, config.n_positions),
        padded_vocab_size=config.padded_vocab_size,
    )


def device(job: Job, gate: Gate) -> None:
    """Replies with what the ladder has to know: the device, its FLOP/s by dtype, and the rungs that it cannot run."""
    cuda, bf16 = gate.device.type == "cuda", has_bf16(gate.device)
    count, threads = torch.accelerator.device_count(), torch.get_num_threads()
    name = f"{gate.device.type.upper()} with {threads} thread{'s' * (threads > 1)}"
    dtypes = {"float32": "no", "bfloat16": bf16 and "bf16", "float16": cuda and "fp16"}
    lacking = {"bf16": not bf16 and "only emulated", "compile": inductor_problem(gate.device)}
    if not cuda:
        lacking |= dict.fromkeys(("TF32", "pinned, prefetched data", "fp16"), "CUDA only")
    elif torch.cuda.get_device_capability() < (8, 0):
        lacking["TF32"] = "needs compute capability 8.0"
    if not cuda or count == 1:
        lacking["DDP over all devices"] = "needs several GPUs"
    gate.reply(
        type=gate.device.type,
        name=torch.cuda.get_device_name() if cuda else name,
        devices=max(count, 1),
        lacking={rung: reason for rung, reason in lacking.items() if reason},
        flops={name: matrix_rate(gate.device, kind) for name, kind in dtypes.items() if kind},
    )


KINDS: dict[str, Callable[[Job, Gate], None]] = {
    kind.__name__: kind for kind in (toolkit, hf_trainer, loop, attention, matmul, data, device)
}


def main() -> None:
    end_with_parent(signal.SIGKILL)
    # Send the stdout of libraries to stderr, so that stdout has replies only.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    if job.output_dir:
        Path(job.output_dir).mkdir(parents=True)
    KINDS[job.kind](job, Gate(job, replies))


if __name__ == "__main__":
    main()
