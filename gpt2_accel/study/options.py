"""The options of every study: where it records, and how its runs are launched."""

from dataclasses import dataclass
from pathlib import Path

from gpt2_accel.config import check_ranges, setting
from gpt2_accel.study.children import launch_environment, slots
from gpt2_accel.study.engine import Engine


@dataclass
class EngineOptions:
    """Options that a study's recipe has beside its own. Raises `ValueError` for a value out of its range."""

    output_dir: str | None = setting(None, "folder of the study; default runs/<its name>")
    table: str | None = setting(
        None, "CSV file that records the runs; default runs.csv in the folder"
    )
    accelerate_config: str | None = setting(
        None, "Accelerate config for each run: its precision and compilation; one process"
    )
    processes: int | None = setting(None, "runs at a time; default one per GPU, or per CPU core")
    keep_models: bool = setting(False, "keep the weights and checkpoints of recorded runs")

    def __post_init__(self) -> None:
        check_ranges(self, positive="processes")

    def engine(self, folder: Path, part: tuple[int, int] = (0, 1)) -> Engine:
        """Returns the engine of a study in `output_dir`, by default `folder`."""
        folder = Path(self.output_dir or folder)
        name = "runs.csv" if part == (0, 1) else f"runs-{part[0]}-of-{part[1]}.csv"
        table = Path(self.table or folder / name)
        env, precision = launch_environment(self.accelerate_config)
        found = slots(self.processes, env)
        return Engine(folder, table, found, env, precision, self.keep_models, part)
