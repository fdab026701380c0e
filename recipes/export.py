"""Export the mean of the last checkpoints of a run as a Hugging Face model directory.

    python recipes/export.py --model runs/quickstart --average 2 --output runs/average

The mean may have a lower validation loss than the last checkpoint (Izmailov et al., 2018,
arXiv:1803.05407). Every recipe reads the directory. For GGUF and ONNX see docs/hub.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, parse_config, required, setting

if TYPE_CHECKING:
    from gpt2_accel.models import LanguageModel


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


def average(checkpoints: Sequence[Path]) -> "LanguageModel":
    """Returns the model with the mean weights of a run's checkpoints, on the CPU.

    Computes each mean in fp64 and rounds it to the dtype of the files. Two models and the fp64 sums
    are in memory. Raises `ValueError` for an adapter or a damaged checkpoint.
    """
    from gpt2_accel import from_pretrained
    from gpt2_accel.hf.safetensors_files import is_adapter, read_tensors, weight_files
    from gpt2_accel.hf.tensors import check_finite
    from gpt2_accel.models import convert_parameters

    last = checkpoints[-1]
    if is_adapter(last):
        raise ValueError(
            f"{last} is an adapter, and a mean of adapters is not the mean of their models: give a "
            "run that trains all weights"
        )
    model = from_pretrained(last)
    sums = {name: weight.detach().cpu().double() for name, weight in model.named_parameters()}
    for path in checkpoints[:-1]:
        for name, weight in from_pretrained(path).named_parameters():
            sums[name] += weight.detach()
    _, tensor = next(read_tensors(weight_files(last)))
    convert_parameters(model, tensor.dtype)
    for name, weight in model.named_parameters():
        weight.data.copy_(sums[name] / len(checkpoints))
    check_finite(model, f"the mean of {checkpoints[0]} to {last.name}")
    return model


def main() -> None:
    config = parse_config(Export)
    from gpt2_accel import save_pretrained
    from gpt2_accel.checkpoint.find import list_checkpoints, verified_directory
    from gpt2_accel.tokenizer import load_tokenizer

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
