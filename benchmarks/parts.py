"""Measures everything around the updates: startup, batches, preparation of text, checkpoints.

    python benchmarks/parts.py

- Startup: `import gpt2_accel.train`, and a whole command up to the first update of a tiny model.
- Batches: tokens per second of the loader, in batches of 8 x 1,024 random tokens.
- Preparation: MB/s of synthetic text to shards with GPT-2's BPE, compared with tiktoken alone on one core. It is
  skipped if GPT-2's BPE is not available.
- Checkpoint: the time that the loop waits for a checkpoint of 124M with AdamW, compared with a copy of the tensors.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from processes import HERE, python
from results import RESULTS, summary, write_result
from synthetic_data import many_characters, random_sentences, random_shards
from timing import seconds_each, seconds_of, this_device

from gpt2_accel import GPT, GPTConfig, cli
from gpt2_accel.checkpoint.state_dict import optimizer_tensors, unwrap
from gpt2_accel.checkpoint.writer import CheckpointWriter
from gpt2_accel.config import parse_config, setting
from gpt2_accel.data.loader import TrainLoader, open_split
from gpt2_accel.hf.model_card import Training
from gpt2_accel.optim import build_optimizer
from gpt2_accel.runtime.accelerator import build_accelerator

ROOT = HERE.parent
CPU = torch.device("cpu")


@dataclass
class Parts:
    rounds: int = setting(3, "measurements of each part")
    text_mb: int = setting(50, "MB of text to tokenize")
    workers: int = setting(2, "processes that tokenize the text")
    size: str = setting("gpt2", "model of the checkpoint")
    results: str = setting(str(RESULTS), "folder of the results")


def main() -> None:
    config = parse_config(Parts)
    found = {}
    for name, measure in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(config, Path(folder))
        print(name, json.dumps(found[name]), flush=True)
    write_result("parts", found, config.results)


def import_time(config: Parts, folder: Path) -> dict[str, float]:
    """Measures the seconds to import the loop."""

    def start() -> None:
        python("-c", "import gpt2_accel.train")

    return summary(seconds_each(start, CPU, repeats=config.rounds))


def first_update(config: Parts, folder: Path) -> dict[str, float]:
    """Measures the seconds from the start of a command until the first update of a tiny model is logged."""
    random_shards(folder / "data", 65, 2**16)
    shape = "--n_layer 2 --n_head 2 --n_embd 32 --n_positions 32 --micro_batch_size 4"
    run = "--total_batch_size 128 --max_steps 2 --log_every 1 --eval_every 0 --sample_every 0"
    command = [sys.executable, "recipes/quickstart.py", *shape.split(), *run.split()]
    seconds = []
    for number in range(config.rounds + 1):
        metrics = folder / str(number) / "metrics.jsonl"
        where = ["--data_dir", str(folder / "data"), "--output_dir", str(metrics.parent)]
        begun = time.perf_counter()
        with subprocess.Popen([*command, *where], cwd=ROOT, stdout=-3, stderr=-3) as process:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll():
                    raise RuntimeError(f"{' '.join(process.args)} failed: run it to see why")
                time.sleep(0.005)
            seconds.append(time.perf_counter() - begun)
    return summary(seconds[1:])


def loader_speed(config: Parts, folder: Path) -> dict[str, float]:
    """Measures the tokens per second of the training batches, copy to the device included."""
    random_shards(folder / "data", 50257, 2**20)
    device = this_device()
    split, options = open_split(folder / "data", "train"), {"seed": 1337, "device": device}
    loader = TrainLoader(split, sequence_length=1024, micro_batch_size=8, **options)

    def read() -> None:
        for _ in loader.update(0, 8 * 200):
            pass

    seconds = seconds_each(read, device, repeats=config.rounds)
    return summary([8 * 200 * 1024 / each for each in seconds])


def preparation_speed(config: Parts, folder: Path) -> dict[str, float | str]:
    """Measures MB/s from a JSONL file to shards, startup included, and of tiktoken on the same text."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError:
        return {"missing": "GPT-2's BPE is not available"}
    documents = random_sentences(config.text_mb * 10**6)
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    size = sum(map(len, documents)) / 1e6

    def prepare() -> None:
        workers = ("--workers", str(config.workers))
        python("recipes/prepare_data.py", "text", path, *workers, "--data_dir", folder / "data")

    def alone() -> None:
        for text in documents:
            encoding.encode_ordinary(text)

    speeds = [size / seconds_of(run, CPU) for run in (prepare, alone)]
    return {"speed": speeds[0], "tiktoken": speeds[1], "workers": config.workers, "mb": size}


def checkpoint_time(config: Parts, folder: Path) -> dict[str, dict[str, float]]:
    """Measures the seconds that a save blocks the loop, and those of a copy of weights and optimizer state."""
    accelerator = build_accelerator()
    model = GPT(GPTConfig.from_name(config.size))
    model, optimizer = accelerator.prepare(model, build_optimizer(model, lr=1e-4))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    training = Training({}, "nothing", 0, 0.0, 0.0, "", {})
    tokenizer = many_characters(unwrap(accelerator, model).config.vocab_size)
    quiet = {"saved": lambda path: None, "print_line": print}
    writer = CheckpointWriter(folder, tokenizer, keep_last=1, **quiet)
    facts = {"guard": {}, "data": "", "position": {}, "val_loss": None, "run_id": ""}
    seconds = {"save": [], "copy": []}
    for step in range(config.rounds + 1):
        begun = time.perf_counter()
        writer.save(step, accelerator, model, optimizer, training, **facts)
        seconds["save"].append(time.perf_counter() - begun)
        writer.wait()
        tensors = [*model.state_dict().values(), *optimizer_tensors(optimizer).values()]
        begun = time.perf_counter()
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        seconds["copy"].append(time.perf_counter() - begun)
        del copies
    return {name: summary(each[1:]) for name, each in seconds.items()}


PARTS = {
    "import": import_time,
    "first_update": first_update,
    "loader": loader_speed,
    "preparation": preparation_speed,
    "checkpoint": checkpoint_time,
}

if __name__ == "__main__":
    cli.run(main)
