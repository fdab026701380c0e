"""Writes and reads the results of the benchmarks, `benchmarks/results/<cpu or cuda>/<name>.json`."""

import datetime
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from gpt2_accel.files import write_json

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str | int]:
    """Returns the device, threads, torch version and date of a measurement."""
    import torch  # imported here, so that a process that only starts others needs no memory for it

    cuda = torch.cuda.is_available()
    return {
        "type": "cuda" if cuda else "cpu",
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """Returns the name of this machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def write_result(name: str, figures: dict, folder: str | Path = RESULTS) -> Path:
    """Writes the results of the benchmark `name`, with the machine; returns the path."""
    result = {"machine": machine(), **figures}
    path = Path(folder) / result["machine"]["type"] / f"{name}.json"
    write_json(path, result)
    print(f"wrote {path}", flush=True)
    return path


def read_result(name: str, kind: str = "cpu", folder: str | Path = RESULTS) -> dict | None:
    """Returns the results of the benchmark `name` on a `kind` of device, or None if there are none."""
    path = Path(folder) / kind / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum and maximum of the values of all rounds."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Returns `above` / `below` for each round, so that changes of the machine between rounds cancel."""
    return [a / b for a, b in zip(above, below, strict=True)]
