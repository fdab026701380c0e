"""Export the mean of the last checkpoints of a run as a Hugging Face model directory.

    python recipes/export.py --model runs/quickstart --average 2 --output runs/average

The mean may have a lower validation loss than the last checkpoint. Every recipe reads the
directory. For GGUF and ONNX see docs/hub.md.
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.checkpoint.find import list_checkpoints, verified_directory
from gpt2_accel.config import check_ranges, parse_config, required, setting
from gpt2_accel.hf.convert import save_pretrained
from gpt2_accel.tokenizer import load_tokenizer
from gpt2_accel.tools.average import average


@dataclass
class Export:
    model: str = required("folder of the run")
    average: int = required("number of checkpoints to average, the last ones")
    output: str = required("folder to write")
    verify: bool = setting(True, "compare the files of the checkpoints with their checksums first")

    def __post_init__(self) -> None:
        check_ranges(self, positive="average")
        if Path(self.output).exists():
            raise FileExistsError(
                f"{self.output} exists already, and an export does not overwrite it: choose "
                "another --output"
            )


def main() -> None:
    config = parse_config(Export)
    checkpoints = list_checkpoints(config.model)[-config.average :]
    if not checkpoints:
        raise FileNotFoundError(f"{config.model} holds no checkpoints: give the folder of a run")
    if len(checkpoints) < config.average:
        raise ValueError(
            f"--average {config.average} needs {config.average} checkpoints, and the run has "
            f"{len(checkpoints)}: train with --keep_last {config.average}"
        )
    for path in checkpoints:
        verified_directory(path, config.verify)
    save_pretrained(average(checkpoints), config.output, load_tokenizer(checkpoints[-1]))
    names = ", ".join(path.name for path in checkpoints)
    print(f"The mean of {names} is in {config.output}.")


if __name__ == "__main__":
    cli.run(main)
