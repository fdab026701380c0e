"""Push a model to the Hugging Face Hub.

    hf auth login
    python recipes/push_to_hub.py --model runs/quickstart --repo_id USER/NAME

`--model` is the folder of a run, a checkpoint, or the directory of any causal language model.
Everyone with access to the repository can load the model: `pipeline("text-generation",
model="USER/NAME")`.
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import parse_config, required, setting


@dataclass
class PushToHub:
    model: str = required("run folder, checkpoint or HF model directory")
    repo_id: str = required("repository, USER/NAME")
    private: bool = setting(True, "make the repository private if it is new")
    verify: bool = setting(True, "compare the files of the model with their checksums first")


def main() -> None:
    config = parse_config(PushToHub)
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.hf.convert import read_config
    from gpt2_accel.hf.hub import check_push, push_model
    from gpt2_accel.hf.safetensors_files import weight_files

    check_push(config.repo_id)
    directory = Path(verified_directory(config.model, config.verify))
    read_config(directory)  # raises for a model that is not supported
    weight_files(directory)  # raises if files are missing
    url = push_model(directory, config.repo_id, private=config.private)
    print(f"The model is at {url}.")


if __name__ == "__main__":
    cli.run(main)
