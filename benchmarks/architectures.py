"""Qwen3's architecture beside GPT-2's: the loss after each of the changes between them.

    python benchmarks/architectures.py

Continues `token_value.py`: the same corpora, sequences and losses, its smaller size, its settings of Muon. The models are
GPT-2, GPT-2 with one more of Qwen3's changes at a time (`between.py`), and Qwen3 with half as many key-value heads and an
MLP of three times the width. All have as many FLOPs for each token, to 3%, and as many parameters, to 6%: position
embeddings are parameters without FLOPs. For each model and corpus:

1. the peak learning rate, to a factor of two, with seed 0; the other settings are those that were tuned for GPT-2;
2. `--seeds` other seeds at that rate;
3. the milliseconds of an update, all models in turns, and the same seeds with the tokens that a model trains on in the
   time of GPT-2, to 5%.

The runs are in `architectures.csv` in the results. Runs that it contains are skipped.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from results import RESULTS, read_result, write_result
from token_training import MODELS, Training, Trial, build
from token_value import SMALL, Runs, best_rate, worker_processes

from gpt2_accel import cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.kernels.cpu import tune_memory

WARM_UP, TIMED = 5, 40  # updates before and during timing


@dataclass
class Study:
    seeds: int = setting(5, "runs of each model, with seeds 1, 2, …")
    processes: int = setting(os.cpu_count() or 1, "runs at a time, each on one thread")
    results: str = setting(str(RESULTS), "folder of the results")


def settings_found(folder: str) -> list[Trial]:
    """Returns Muon's settings in the study of tokens, with its smaller number of tokens, for each corpus.

    Raises `FileNotFoundError` if there is no such study.
    """
    found = read_result("token_value", "cpu", folder)
    if found is None:
        raise FileNotFoundError(
            f"{folder} has no token_value.json: run benchmarks/token_value.py first"
        )
    trials = [Trial(**entry["trial"]) for entry in found["finals"] if entry["name"] == "Muon"]
    least = min(trial.tokens for trial in trials)
    return [trial for trial in trials if (trial.size, trial.tokens) == (SMALL, least)]


def parameter_count(trial: Trial) -> int:
    """Returns the parameters of a trial's model, without vocabulary padding."""
    model, vocab_size = build(trial), read_manifest(trial.corpus)["tokenizer"]["vocab_size"]
    padding = model.head_weight[vocab_size:].numel()
    return sum(p.numel() for p in model.parameters()) - padding


def milliseconds(trials: Sequence[Trial]) -> list[float]:
    """Measures the median milliseconds of an update of each trial, in turns, on one thread."""
    torch.set_num_threads(1)
    tune_memory()
    trainings = [Training(trial) for trial in trials]
    times: list[list[float]] = [[] for _ in trainings]
    for step in range(WARM_UP + TIMED):
        for training, found in zip(trainings, times, strict=True):
            begun = time.perf_counter()
            training(step)
            found.append((time.perf_counter() - begun) * 1000)
    return [median(found[WARM_UP:]) for found in times]


def study(config: Study, runs: Runs, bases: Sequence[Trial]) -> list[dict]:
    """Trains what the study needs; returns an entry for each corpus and model."""
    seeds = range(1, config.seeds + 1)
    entries = []
    for base in bases:
        kinds = [replace(base, model=model) for model in MODELS]
        with ThreadPoolExecutor(len(kinds)) as threads:
            tuned = list(threads.map(lambda trial: best_rate(runs, trial), kinds))
        times = milliseconds(tuned)
        for trial, own in zip(tuned, times, strict=True):
            # To 5%, so that most runs are found again if the study is started again and times differ.
            timed = replace(trial, tokens=int(round(20 * times[0] / own) / 20 * trial.tokens))
            runs.run(replace(t, seed=seed) for seed in seeds for t in (trial, timed))
            entries.append(
                {
                    "trial": asdict(trial),
                    "parameters": parameter_count(trial),
                    "milliseconds": own,
                    "losses": runs.run(replace(trial, seed=seed) for seed in seeds),
                    "tokens_in_time": timed.tokens,
                    "losses_in_time": runs.run(replace(timed, seed=seed) for seed in seeds),
                }
            )
    return entries


def main() -> None:
    config = parse_config(Study)
    path = Path(config.results) / "cpu" / "architectures.csv"
    with worker_processes(config.processes) as workers:
        entries = study(config, Runs(path, workers), settings_found(config.results))
    write_result("architectures", {"entries": entries}, config.results)


if __name__ == "__main__":
    cli.run(main)
