"""The options of every study: where it records, and how many runs train at a time."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel.config import check_ranges, setting
from gpt2_accel.tools.study import children

if TYPE_CHECKING:
    from gpt2_accel.tools.study.engine import Engine


@dataclass
class EngineOptions:
    """Options that a study's recipe has beside its own. Raises `ValueError` for a value out of its range."""

    output_dir: str | None = setting(None, "folder of the study; default runs/<its name>")
    table: str | None = setting(
        None, "CSV file that lists the recorded runs; default runs.csv in the folder"
    )
    processes: int | None = setting(None, "runs at a time; default one per GPU, or per CPU core")
    gpus_per_run: int = setting(1, "GPUs of each run; without a GPU its processes")
    keep_models: bool = setting(False, "keep the weights and checkpoints of recorded runs")
    dry_run: bool = setting(False, "print the runs, their FLOPs and hours, then exit")

    def __post_init__(self) -> None:
        check_ranges(self, positive="processes gpus_per_run")
        if (count := int(os.environ.get("WORLD_SIZE", 1))) > 1:
            raise ValueError(
                f"the launch has {count} processes: a study has one, and starts a run on each GPU itself"
            )

    def engine(self, folder: Path) -> "Engine":
        """Returns the engine of a study in `output_dir`, by default `folder`."""
        children.prepare()
        from gpt2_accel.tools.study.engine import Engine

        folder, each = Path(self.output_dir or folder), self.gpus_per_run
        if self.table and not Path(self.table).exists():
            print(f"{self.table} does not exist yet: it records no run")
        return Engine(
            folder,
            Path(self.table or folder / "runs.csv"),
            children.slots(self.processes, each),
            each,
            children.precision(each),
            self.keep_models,
        )
