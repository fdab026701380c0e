"""Studies: grids of runs, comparisons with intervals, tuning, scaling laws."""

import os
from dataclasses import dataclass
from importlib.util import find_spec

from gpt2_accel.config import setting


@dataclass
class StudyOptions:
    """Options of every recipe that runs a study. Raises `ValueError` for a launch of several
    processes, or if scipy is missing."""

    output_dir: str | None = setting(None, "folder of the study; default runs/<its name>")
    dry_run: bool = setting(False, "print the runs and their FLOPs, then exit")

    def __post_init__(self) -> None:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError("start a study with one process: docs/studies.md uses several GPUs")
        if find_spec("scipy") is None:
            raise ValueError("a study needs scipy: pip install 'scipy>=1.13'")
