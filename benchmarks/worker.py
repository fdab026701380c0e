"""The process that measures: `python worker.py JOB FOLDER`, where JOB is a `Job` as JSON.

It warms up and replies. Then each line of stdin has a number of updates, which it makes before it
replies {"seconds", "memory"}, a line of JSON on stdout. It runs until it is killed. Of several
processes rank 0 replies.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from nanogpt import plain_optimizer, plain_update, random_batches
from processes import ANSWER_TOKENS, ANSWERS, Job
from reference_model import PlainLoss, slow_gpt
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpt2_accel.config import TrainConfig
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.optim import build_optimizer
from gpt2_accel.runtime.accelerator import configure_backends
from gpt2_accel.runtime.device import AUTOCAST_DTYPES, launch_device
from gpt2_accel.runtime.signals import end_with_parent

# A job imports other libraries inside its function, so that they use no memory in other jobs.

ENDLESS = 10**7  # updates; the parent ends the run
LEARNING_RATE = 6e-4
BETA2 = 0.95
DEVICE = launch_device()


class Gate:
    """Is called after each update; after the last update of a turn it replies and waits for the
    next turn."""

    def __init__(self, warmup: int, replies: TextIO):
        self.left = warmup
        self.replies = replies
        self.begun = time.perf_counter()

    def __call__(self, **figures: float) -> None:
        """Counts an update; after the last one of a turn replies with time, memory, `figures`."""
        self.left -= 1
        if self.left:
            return
        if DEVICE.type != "cpu":
            torch.accelerator.synchronize(DEVICE)
        seconds = time.perf_counter() - self.begun
        reply = {"seconds": seconds, "memory": peak_memory()} | figures
        if DEVICE.type == "cuda":
            reply["reserved"] = torch.cuda.max_memory_reserved(DEVICE)
        print(json.dumps(reply), file=self.replies, flush=True)
        self.left = int(sys.stdin.readline())
        self.begun = time.perf_counter()


def peak_memory() -> int:
    """Returns the peak memory so far in bytes: of tensors on a CUDA GPU, else of this process."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated(DEVICE)
    if sys.platform.startswith("linux"):  # unlike `ru_maxrss`, without the memory of the parent
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def toolkit(job: Job, folder: str, gate: Gate) -> None:
    """This package's `train`; the environment sets precision and compilation, as a launch does."""
    from gpt2_accel.train import train

    shape = {name: value for name, value in job.shape.items() if name != "vocab_size"}
    config = TrainConfig(
        **shape,
        architecture=job.architecture,
        data_dir=job.data_dir,
        output_dir=folder,
        micro_batch_size=job.batch_size,
        residual_dtype=job.residual_dtype,
        total_batch_size=job.tokens,
        learning_rate=LEARNING_RATE,
        beta2=BETA2,
        max_steps=ENDLESS,
        eval_every=0,
        sample_every=0,
        save_every=0,
    )
    train(config)


def hf_trainer(job: Job, folder: str, gate: Gate) -> None:
    """`transformers.Trainer` with GPT-2 of transformers in the same shape, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(
        **job.shape,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        activation_function="gelu_pytorch_tanh",  # GPT-2's function, the faster of two
        use_cache=False,
    )
    on_cpu = DEVICE.type == "cpu"
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=on_cpu,
        bf16=job.precision == "bf16",
        torch_compile=job.compile,
        per_device_train_batch_size=job.batch_size,
        gradient_accumulation_steps=job.accumulation,
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
    windows = torch.randint(config.vocab_size, (4096, config.n_positions))
    rows = [{"input_ids": window, "labels": window} for window in windows]
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows).train()


def loop(job: Job, folder: str, gate: Gate) -> None:
    """A plain loop on random tokens, without Accelerate, logging or anomaly guard."""
    if job.ddp:
        if torch.accelerator.is_available():  # gloo on a CPU, for the tests
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group()
    if job.tf32 and DEVICE.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if job.chunked_loss:
        configure_backends(DEVICE, job.precision, job.compile, deterministic=False)
    torch.manual_seed(1337)
    model = build_model(job).to(DEVICE)
    if job.optimizer == "toolkit":
        optimizer = build_optimizer(model, TrainConfig(learning_rate=LEARNING_RATE, beta2=BETA2))
    else:  # "slow" updates each tensor with separate operations
        options = {"fused": False, "foreach": False} if job.optimizer == "slow" else {}
        optimizer = plain_optimizer(model, LEARNING_RATE, BETA2, **options)
    if job.ddp:
        model = nn.parallel.DistributedDataParallel(model)
    if job.compile:
        model = torch.compile(model)
    text = torch.randint(min(job.shape["vocab_size"], 50257), (2**20,))
    length = job.shape["n_positions"]
    batches = random_batches(text, job.batch_size, length, DEVICE, pinned=job.prefetch)
    update = plain_update(model, optimizer, batches, job.precision, job.accumulation, job.prefetch)
    while True:
        update()


def build_model(job: Job) -> nn.Module:
    """Builds a module that maps (input_ids, targets), both (B, T) int64, to the loss in nats."""
    config = GPTConfig(**job.shape)
    if job.hand_attention:
        model = slow_gpt(config, stored_mask=job.stored_mask, hand_norm_gelu=job.hand_norm_gelu)
        return PlainLoss(model)
    return GPT(config) if job.chunked_loss else PlainLoss(GPT(config))


def matmul(job: Job, folder: str, gate: Gate) -> None:
    """The product of two large square matrices; replies with its FLOP/s, the best of ten."""
    dtype = AUTOCAST_DTYPES.get(job.precision, torch.float32)
    size = 2048 if DEVICE.type == "cpu" else 8192
    a = torch.randn(size, size, device=DEVICE).to(dtype)
    b = torch.randn(size, size, device=DEVICE).to(dtype)
    while True:
        seconds = []
        for _ in range(10):
            begun = time.perf_counter()
            (a @ b)[0, 0].item()  # waits for the device
            seconds.append(time.perf_counter() - begun)
        gate(flops=2 * size**3 / min(seconds))


def generate(job: Job, folder: str, gate: Gate) -> None:
    """This package's generation: greedy, without end of text, after 16 random tokens."""
    from gpt2_accel.generation.sampling import Sampling, tokens
    from gpt2_accel.hf.convert import from_pretrained
    from gpt2_accel.models import convert_parameters

    model = from_pretrained(job.model) if job.model else GPT(GPTConfig(**job.shape))
    model = model.to(DEVICE).eval()
    convert_parameters(model, AUTOCAST_DTYPES.get(job.precision, torch.float32))
    prompts = torch.randint(model.config.vocab_size, (job.batch_size, 16)).tolist()
    sampling = Sampling(job.new_tokens, temperature=0, compile=job.compile)
    while True:
        for _ in tokens(model, prompts, sampling):
            pass
        gate()


def hf_generate(job: Job, folder: str, gate: Gate) -> None:
    """The same with `generate` of transformers: the same model, or GPT-2 of the same shape."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    if job.model:
        model = AutoModelForCausalLM.from_pretrained(job.model)
        model.generation_config.eos_token_id = None
    else:
        config = GPT2Config(**job.shape, bos_token_id=None, eos_token_id=None)
        model = GPT2LMHeadModel(config)
    model = model.to(DEVICE, AUTOCAST_DTYPES.get(job.precision, torch.float32)).eval()
    prompts = torch.randint(model.config.vocab_size, (job.batch_size, 16), device=DEVICE)
    while True:
        model.generate(prompts, max_new_tokens=job.new_tokens, do_sample=False, pad_token_id=0)
        gate()


def chat_recipe(job: Job, folder: str, gate: Gate) -> None:
    """`chat_sft.py`, `chat_dpo.py` or `chat_rl.py`, with a command line."""
    flags = {
        "model": job.model,
        "data": job.data,
        "output_dir": folder,
        "micro_batch_size": job.batch_size,
        "learning_rate": LEARNING_RATE,
        "beta2": BETA2,
        "lora": job.lora,
        "max_steps": ENDLESS,
        "eval_every": 0,
        "sample_every": 0,
        "save_every": 0,
    }
    if job.recipe == "chat_dpo":
        flags |= {"batch_size": job.batch_size}
    elif job.recipe == "chat_rl":
        flags |= {"batch_size": job.batch_size, "micro_batch_size": job.batch_size}
        flags |= {"group": ANSWERS, "max_new_tokens": ANSWER_TOKENS}
        flags |= {"reward": "exact", "test_every": 0}
    else:
        flags |= {"sequence_length": job.length, "total_batch_size": job.batch_size * job.length}
    script = Path(__file__).parent.parent / f"recipes/{job.recipe}.py"
    sys.argv = [str(script)]
    for name, value in flags.items():
        sys.argv += [f"--{name}", str(value)]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def no_reward(completions: list, **fields: object) -> list[float]:
    """Gives each answer 0."""
    return [0.0] * len(completions)


def trl_trainer(job: Job, folder: str, gate: Gate) -> None:
    """TRL's `SFTTrainer`, with PEFT for LoRA, or TRL's `DPOTrainer` or `GRPOTrainer`."""
    import trl
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = {
        "output_dir": folder,
        "use_cpu": DEVICE.type == "cpu",
        "bf16": job.precision == "bf16",
        "gradient_checkpointing": False,  # by default it computes each forward twice
        "per_device_train_batch_size": job.batch_size,
        "max_steps": ENDLESS,
        "learning_rate": LEARNING_RATE,
        "adam_beta2": BETA2,
        "weight_decay": 0.1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    options: dict[str, Any] = {}
    if job.recipe == "chat_dpo":
        trainer = trl.DPOTrainer
        # As in `chat_dpo.py`: the reference's log-probabilities are computed first.
        arguments |= {"max_length": job.length, "precompute_ref_log_probs": True}
        settings = trl.DPOConfig(**arguments, beta=0.5)
    elif job.recipe == "chat_rl":
        trainer = trl.GRPOTrainer
        arguments |= {"per_device_train_batch_size": job.batch_size * ANSWERS}
        arguments |= {"num_generations": ANSWERS, "max_completion_length": ANSWER_TOKENS}
        arguments |= {"loss_type": "dapo", "scale_rewards": "none", "beta": 0.0, "top_k": 0}
        settings = trl.GRPOConfig(**arguments)
        options["reward_funcs"] = no_reward
    else:
        trainer = trl.SFTTrainer
        arguments |= {"max_length": job.length, "packing": job.packed}
        settings = trl.SFTConfig(**arguments, assistant_only_loss=True)
    if job.lora:
        options["peft_config"] = LoraConfig(
            r=job.lora,
            lora_alpha=8,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    trainer(
        AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        args=settings,
        train_dataset=load_dataset("json", data_files=job.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        **options,
    ).train()


def hf_loop(job: Job, folder: str, gate: Gate) -> None:
    """A plain loop with a model of transformers, fused AdamW and clipping, on random windows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).to(DEVICE)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, BETA2), fused=True)
    dtype = AUTOCAST_DTYPES.get(job.precision)
    shape = (job.batch_size, job.length)
    while True:
        windows = torch.randint(model.config.vocab_size, shape, device=DEVICE)
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            loss = model(input_ids=windows, labels=windows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


KINDS = {
    "toolkit": toolkit,
    "hf_trainer": hf_trainer,
    "loop": loop,
    "chat_recipe": chat_recipe,
    "trl_trainer": trl_trainer,
    "hf_loop": hf_loop,
    "matmul": matmul,
    "generate": generate,
    "hf_generate": hf_generate,
}


def main() -> None:
    end_with_parent(signal.SIGKILL)
    # The stdout of libraries goes to stderr, so that stdout has only replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    gate = Gate(job.warmup, replies)
    if os.environ.get("RANK", "0") == "0":
        # In every trainer an update ends with the optimizer's step.
        register_optimizer_step_post_hook(lambda *_: gate())
    KINDS[job.kind](job, sys.argv[2], gate)


if __name__ == "__main__":
    main()
