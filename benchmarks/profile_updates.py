"""Traces updates of GPT-2 124M (without a GPU: a tiny model) and lists the ten operations that take longest.

    python benchmarks/profile_updates.py

On a GPU the run is compiled in bf16, and the operations are its kernels. Writes `profile.json`, and the whole trace as
`trace.json.gz` for https://ui.perfetto.dev, beside the other results.
"""

import argparse
import gzip
import json
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from results import RESULTS, write_result
from synthetic_data import random_shards
from timing import this_device

from gpt2_accel.config import TrainConfig
from gpt2_accel.device import has_bf16
from gpt2_accel.train import train

SHOWN, UPDATES = 10, 4
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}


def trace_run(folder: Path, batch_size: int) -> list[dict]:
    """Trains for a few updates on random tokens; returns the events of the trace, which is `folder`/run/trace-0.json."""
    device = this_device()
    cuda = device.type == "cuda"
    precision = "no" if not cuda else "bf16" if has_bf16(device) else "fp16"
    backend = "INDUCTOR" if cuda else "NO"
    os.environ |= {"ACCELERATE_MIXED_PRECISION": precision, "ACCELERATE_DYNAMO_BACKEND": backend}
    shape = {} if cuda else TINY
    random_shards(folder / "data", 50257 if cuda else 65, 2**20 if cuda else 2**14)
    settings = {
        "data_dir": str(folder / "data"),
        "output_dir": str(folder / "run"),
        "micro_batch_size": batch_size,
        "total_batch_size": 2 * batch_size * shape.get("n_positions", 1024),
        "max_steps": 6 + UPDATES,
        "profile": UPDATES,
    }
    train(TrainConfig(**settings, **shape, eval_every=0, sample_every=0, save_every=0))
    return json.loads((folder / "run" / "trace-0.json").read_text())["traceEvents"]


def most_expensive(events: list[dict]) -> dict:
    """Returns the operations with the most time, and the time of all: on a GPU of its kernels, else of the operators."""
    kinds = {event.get("cat") for event in events}
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if "kernel" in kinds else ("cpu_op",)
    times: dict[str, list[float]] = defaultdict(list)  # milliseconds of each call
    for event in events:
        if event.get("cat") in wanted and "dur" in event:
            times[event["name"]].append(event["dur"] / 1e3)
    spent = {name: sum(each) for name, each in times.items()}
    total = sum(spent.values())
    operations = [
        {
            "name": name,
            "milliseconds": spent[name] / UPDATES,
            "share": spent[name] / total,
            "calls": len(times[name]) / UPDATES,
        }
        for name in sorted(spent, key=spent.get, reverse=True)[:SHOWN]
    ]
    totals = {"updates": UPDATES, "milliseconds": total / UPDATES}
    return {"kind": wanted[0], **totals, "operations": operations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    parser.add_argument("--batch_size", type=int, help="sequences of a micro-batch; on a GPU 32")
    options = parser.parse_args()
    batch_size = options.batch_size or (32 if this_device().type == "cuda" else 4)
    with tempfile.TemporaryDirectory() as name:
        found = most_expensive(trace_run(Path(name), batch_size))
        path = write_result("profile", {"batch_size": batch_size, **found}, options.results)
        with (
            open(Path(name) / "run" / "trace-0.json", "rb") as trace,
            gzip.open(path.with_name("trace.json.gz"), "wb") as packed,
        ):
            shutil.copyfileobj(trace, packed)
    for operation in found["operations"]:
        print("{share:6.1%} {milliseconds:9.3f} ms {calls:7.1f} x {name}".format(**operation))


if __name__ == "__main__":
    main()
