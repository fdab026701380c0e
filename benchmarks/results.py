"""Writes and reads results of the benchmarks, `benchmarks/results/<cpu or cuda>/<name>.json`."""

import datetime
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from gpt2_accel import __version__
from gpt2_accel.runtime.files import write_json
from gpt2_accel.runtime.metadata import git_commit

RESULTS = Path(__file__).parent / "results"


def kind() -> str:
    """Returns the folder of this machine's results: "cuda" with an NVIDIA GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine() -> dict[str, str | int | None]:
    """Returns device, threads, torch version, date, and the package's version and commit."""
    device = torch.cuda.get_device_name() if kind() == "cuda" else processor()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "commit": git_commit(),
    }


def processor() -> str:
    """Returns the name of this machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_result(name: str, figures: dict, folder: str | Path = RESULTS) -> None:
    """Writes the results of the benchmark `name`, with the machine."""
    path = Path(folder) / kind() / f"{name}.json"
    write_json(path, {"machine": machine()} | figures)
    print(f"wrote {path}", flush=True)


def read_results(name: str, folder: str | Path = RESULTS) -> list[dict]:
    """Returns the results of the benchmark `name` on a CPU and on a GPU, those that exist."""
    results = []
    for device in ("cpu", "cuda"):
        path = Path(folder) / device / f"{name}.json"
        if path.exists():
            results.append(json.loads(path.read_text(encoding="utf-8")))
    return results


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum and maximum of the values of all rounds."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Returns the `summary` of `above` / `below` of each round, so that slow rounds cancel."""
    return summary([a / b for a, b in zip(above, below, strict=True)])
