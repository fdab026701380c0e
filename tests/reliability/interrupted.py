"""Runs in other processes, to be killed and resumed."""

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

from conftest import as_flags, metrics
from launching import ROOT, Started

from gpt2_accel.runtime.files import read_json_lines

SCRIPT = str(ROOT / "tests/train_script.py")
KILLING_SCRIPT = str(ROOT / "tests/reliability/kill_at_operation.py")


def start(config, *launcher_flags, processes=1, script=SCRIPT, launch="cpu", **env) -> Started:
    """Starts a run in forked processes. `launch` names the launch config."""
    log = Path(f"{config.output_dir}.log")
    command = [*launcher_flags, script, *as_flags(config)]
    return Started(*command, processes=processes, log=log, config=launch, **env)


def finish(config, *launcher_flags, **how) -> None:
    """Runs to the end in other processes."""
    code = start(config, *launcher_flags, **how).wait(300)
    assert code == 0, log_of(config)


def last_step(folder) -> int:
    return max((entry["step"] for entry in metrics(folder)), default=0)


def killed_before_each(start, step, ends=0) -> Iterator[int]:
    """Yields 1, 1 + `step`, … as long as `start(number)` was killed before that operation.

    The last process, which was not killed, has the exit code `ends`.
    """
    for number in itertools.count(1, step):
        code = start(number).returncode
        if code != -signal.SIGKILL:
            break
        yield number
    assert code == ends
    assert number > 1


def repeatable(folder: Path) -> list[list[dict]]:
    """Returns the lines of a run's metrics and samples, without times and memory."""
    files = [read_json_lines(folder / name) for name in ("metrics.jsonl", "samples.jsonl")]
    for line in files[0]:
        for name in [*line]:
            if name.endswith(("_per_second", "/seconds", "/memory_gb")):
                del line[name]
    return files


def log_of(config) -> str:
    return Path(f"{config.output_dir}.log").read_text()
