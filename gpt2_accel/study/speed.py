"""The speed of training, measured by short runs and stored, so that a budget in minutes is the same number of tokens for
everyone who continues a study."""

import json
import time
from pathlib import Path
from statistics import median

from gpt2_accel.files import read_json_lines, write_json
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.study.claims import claim
from gpt2_accel.study.engine import LOG, PAUSE, WARMUP, Engine, Trial, last_line

PROBE = 60  # updates that measure the speed of training, without an evaluation
# Settings that do not change the speed.
SPEEDLESS = set(
    f"learning_rate lr_schedule decay_share warmup_steps {WARMUP} min_lr_ratio weight_decay beta1 beta2 max_grad_norm "
    "seed max_steps".split()
)


def speed(engine: Engine, trial: Trial) -> float:
    """Returns the tokens per second of training a trial, measured once with a run in each slot at the same time, and stored
    beside the table of runs. Of several processes one measures, and the others wait.

    Raises `ValueError` if the measurement fails, `KeyboardInterrupt` after a signal.
    """
    path = engine.table.with_name(f"{engine.table.stem}-speeds.json")
    plain = {name: v for name, v in trial.resolved.items() if name not in SPEEDLESS}
    id = Trial(trial.recipe, {}, plain).id(engine.precision)
    folder = engine.folder / "probes" / id
    with StopRequest() as stop:
        while id not in (known := read_speeds(path)):
            if (own := claim(folder)) is None:
                if stop.reason:
                    raise KeyboardInterrupt
                time.sleep(1)
                continue
            try:
                write_json(path, known | {id: measure(engine, trial, folder, stop)})
            finally:
                own.release()
    return known[id]


def read_speeds(path: Path) -> dict[str, float]:
    """Returns the measured speeds by the id of what was measured."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def measure(engine: Engine, trial: Trial, folder: Path, stop: StopRequest) -> float:
    """Returns the median of the tokens per second in the second half of `PROBE` updates, over a run in each slot."""
    off = {"eval_every": 0, "sample_every": 0, "save_every": 0, "patience": 0, "keep_best": False}
    changes = {**trial.lasting(PROBE).changes, **off, "log_every": 5}
    folders = [folder / str(number) for number in range(len(engine.slots))]
    children = [
        engine.child(Trial(trial.recipe, changes, {}), place, slot)
        for place, slot in zip(folders, engine.slots, strict=True)
    ]
    while not all([child.ended() for child in children]):
        if stop.reason:
            for child in children:
                child.stop()
        time.sleep(PAUSE)
    if stop.reason:
        raise KeyboardInterrupt
    found = []
    for child, place in zip(children, folders, strict=True):
        if child.code:
            raise ValueError(f"the speed was not measured: {last_line(place / LOG)}")
        lines = read_json_lines(place / "metrics.jsonl")
        speeds = [v for line in lines if (v := line.get("train/tokens_per_second"))]
        found += speeds[len(speeds) // 2 :]
    return median(found)
