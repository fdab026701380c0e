"""Measures the wall time to a validation loss of 1.90 on tiny Shakespeare, for the whole command.

    python benchmarks/shakespeare.py --input shakespeare.txt

`recipes/shakespeare_fast.py`, preparation of the text included, and nanoGPT's settings for a CPU in a plain loop
(`nanogpt.py`) run in turns. Each run has an empty compiler cache. The loss is then computed on the whole validation
split, the last 10% of the text, in windows of the training length.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from nanogpt import CPU_SHAPE, UPDATES
from processes import python
from results import RESULTS, ratios, summary, write_result
from timing import seconds_of

from gpt2_accel import GPT, GPTConfig, cli, from_pretrained
from gpt2_accel.config import parse_config, setting
from gpt2_accel.data.sources import split_text, tiny_shakespeare
from gpt2_accel.device import has_bf16

CPU = torch.device("cpu")
CONFIG = "cpu_bf16" if has_bf16(CPU) else "cpu"
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{CONFIG}.yaml"]
GOAL = 1.90


@dataclass
class Race:
    input: str | None = setting(None, "text file; downloaded if not given")
    rounds: int = setting(1, "runs of each")
    recipe_flags: list[str] = setting([], "further settings of the recipe, such as max_steps=100")
    updates: int = setting(UPDATES, "updates of the plain loop")
    results: str = setting(str(RESULTS), "folder of the results")


def main() -> None:
    config = parse_config(Race)
    try:
        text = tiny_shakespeare(config.input)
    except OSError as error:
        print(f"not measured: {error}")
        missing = {"missing": "tiny Shakespeare is not available"}
        write_result("shakespeare", missing, config.results)
        return
    found = {name: {"seconds": [], "loss": []} for name in ("recipe", "nanogpt")}
    for number in range(config.rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "input.txt"
            path.write_text(text, encoding="utf-8")
            for name, (seconds, loss) in race(config, Path(folder), text).items():
                found[name]["seconds"].append(seconds)
                found[name]["loss"].append(loss)
                print(f"round {number + 1}, {name}: {seconds:.1f} s, loss {loss:.4f}", flush=True)
    for figures in found.values():
        figures["time"] = summary(figures["seconds"])
    speed = summary(ratios(found["nanogpt"]["seconds"], found["recipe"]["seconds"]))
    write_result("shakespeare", {"goal": GOAL, "speed": speed, **found}, config.results)


def race(config: Race, folder: Path, text: str) -> dict[str, tuple[float, float]]:
    """Runs one round; returns the seconds of the whole process and the loss of both."""
    flags = [part for flag in config.recipe_flags for part in f"--{flag}".split("=")]
    recipe = [*LAUNCH, "recipes/shakespeare_fast.py", "--data_dir", folder / "data", *flags]
    plain = ["benchmarks/nanogpt.py", "--updates", config.updates]

    def seconds(command: list, name: str) -> float:
        def run() -> None:
            given = ("--input", folder / "input.txt", "--output_dir", folder / name)
            python(*command, *given, TORCHINDUCTOR_CACHE_DIR=str(folder / "compiled"))

        return seconds_of(run, CPU)

    fast, slow = seconds(recipe, "recipe"), seconds(plain, "plain")
    model = GPT(GPTConfig(len(set(text)), **CPU_SHAPE))
    model.load_state_dict(torch.load(folder / "plain" / "model.pt"))
    return {
        "recipe": (fast, validation_loss(from_pretrained(str(folder / "recipe")), text)),
        "nanogpt": (slow, validation_loss(model, text)),
    }


@torch.no_grad()
def validation_loss(model: GPT, text: str) -> float:
    """Returns the mean loss per character on the last 10% of the text, in windows of `n_positions`."""
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in split_text(text)["val"][0]])
    T = model.config.n_positions
    end = (len(tokens) - 1) // T * T
    windows = tokens[:end].view(-1, T).split(64), tokens[1 : end + 1].view(-1, T).split(64)
    model.eval()
    nats = sum(model(*batch, reduction="none").sum().item() for batch in zip(*windows, strict=True))
    return nats / end


if __name__ == "__main__":
    cli.run(main)
