"""Measures the wall time of a command to a validation loss of 1.90 on tiny Shakespeare.

    python benchmarks/shakespeare.py

`recipes/shakespeare_fast.py`, which also prepares the text, and nanoGPT's settings for a CPU in a
plain loop (`nanogpt.py`) run in turns. Each run starts with an empty compiler cache. The loss is
that of the full validation split, the last 10% of the text, in windows of the training length.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from results import RESULTS, ratios, summary, write_result

from gpt2_accel import from_pretrained
from gpt2_accel.data.sources import one_text
from gpt2_accel.runtime.device import has_bf16

ROOT = Path(__file__).parent.parent
CONFIG = "cpu_bf16" if has_bf16(torch.device("cpu")) else "cpu"
LAUNCH = f"-m accelerate.commands.launch --config_file {ROOT}/accelerate_configs/{CONFIG}.yaml"
PROGRAMS = {
    "`shakespeare_fast.py`": f"{LAUNCH} {ROOT}/recipes/shakespeare_fast.py --data_dir data",
    "nanoGPT's loop, its CPU settings": f"{ROOT}/benchmarks/nanogpt.py",
}
GOAL = 1.90


def run(arguments: str, folder: Path, text: str) -> tuple[float, float]:
    """Runs Python with `arguments` in an empty folder; returns the seconds and the model's loss."""
    (folder / "input.txt").write_text(text, encoding="utf-8")
    command = f"{sys.executable} {arguments} --input input.txt --output_dir run".split()
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    begun = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun, validation_loss(folder / "run", text)


@torch.no_grad()
def validation_loss(model_dir: Path, text: str) -> float:
    """Returns the mean loss on the last 10% of the text, in windows of `n_positions`, in nats per
    character."""
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text[int(len(text) * 0.9) :]])
    model = from_pretrained(model_dir).eval()
    T = model.config.n_positions
    end = (len(tokens) - 1) // T * T
    inputs = tokens[:end].view(-1, T).split(64)
    targets = tokens[1 : end + 1].view(-1, T).split(64)
    nats = 0.0
    for batch in zip(inputs, targets, strict=True):
        nats += model(*batch, reduction="none").sum().item()
    return nats / end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, help="text file; default a download")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    text, _ = one_text(options.input)
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    losses: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(options.rounds):
        for name, arguments in PROGRAMS.items():
            with tempfile.TemporaryDirectory() as folder:
                took, loss = run(arguments, Path(folder), text)
            print(f"{name}: {took:.1f} s, loss {loss:.4f}", flush=True)
            seconds[name].append(took)
            losses[name].append(loss)
    rows = [
        {"name": name, "setting": f"loss {max(losses[name]):.3f}", "time": summary(seconds[name])}
        for name in PROGRAMS
    ]
    ours, theirs = seconds.values()
    rows[1]["speed_up"] = ratios(theirs, ours)
    title = f"tiny Shakespeare to a loss of {GOAL:.2f}, end to end, {options.rounds} rounds"
    write_result("shakespeare", {"title": title, "rows": rows}, options.results)


if __name__ == "__main__":
    main()
