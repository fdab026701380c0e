"""Average the weights of several models: checkpoints of one run, or a model soup.

    python recipes/average_checkpoints.py runs/mine/checkpoint-3000 runs/mine/checkpoint-4000 --output_dir runs/average

Each model is a checkpoint, a run's folder, any Hugging Face GPT-2, Llama or Qwen3 directory, or a Hub id; all have the same
shape and tokenizer. `--output_dir` must be new or empty. transformers, `sample.py`, `evaluate.py` and `--init_from` of
any training recipe load it. Sources: Izmailov et al., 2018, arXiv:1803.05407 (checkpoints of a run); Wortsman et al.,
2022, arXiv:2203.05482 (model soups).
"""

import argparse

from gpt2_accel import cli, save_pretrained
from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.files import atomic_directory, check_unused
from gpt2_accel.hf.average import average, common_tokenizer
from gpt2_accel.hf.convert import local_directory


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="checkpoint, run's folder, HF model directory or Hub id; at least two",
    )
    parser.add_argument("--output_dir", required=True, help="model directory to write")
    parser.add_argument(
        "--verify",
        choices=("true", "false"),
        default="true",
        help="compare a checkpoint's files with their checksums first (default: true)",
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if len(options.models) < 2:
        raise ValueError(f"{options.models[0]} is the only model: give at least two to average")
    check_unused(options.output_dir)
    verify = options.verify == "true"
    directories = [local_directory(verified_directory(name, verify)) for name in options.models]
    tokenizer = common_tokenizer(directories)
    model = average(directories)
    with atomic_directory(options.output_dir) as folder:
        save_pretrained(model, folder, tokenizer, name=options.output_dir)
    print(f"The average of {', '.join(map(str, directories))} is in {options.output_dir}.")


if __name__ == "__main__":
    cli.run(main)
