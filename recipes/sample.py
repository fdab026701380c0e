"""Continue a prompt with a trained model.

    python recipes/sample.py --model runs/quickstart --prompt 'def '

`--model` is a run's folder, any Hugging Face GPT-2, Llama or Qwen3 directory, or a Hub id such as openai-community/gpt2.
A single sample is streamed token by token. `--dtype bfloat16` halves the memory traffic per token. `--compile true`
saves time in one sample of more than about a thousand tokens (docs/generation.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gpt2_accel import cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.generation.sampling import Completion, Sampling, load, stream


@dataclass
class Sample(Sampling):
    model: str = setting("runs/quickstart", "run's folder, HF model directory or Hub id")
    prompt: str = setting("", "text to continue; empty for the start of a text")
    num_samples: int = setting(3, "number of continuations")
    dtype: str = setting("float32", "dtype of the weights: 'float32' or 'bfloat16'")
    compile: bool = setting(
        False, "compile the forward pass of one token: takes about 20 seconds, then is faster"
    )
    logprobs: bool = setting(False, "print each sample's mean log-probability per token, in nats")
    verify: bool = setting(True, "compare a checkpoint's files with their checksums first")


def main() -> None:
    config = parse_config(Sample)
    model, tokenizer = load(config.model, config.dtype, verify=config.verify)
    written = stream(
        model,
        tokenizer,
        [config.prompt],
        config,
        logprobs=config.logprobs,
        compile=config.compile,
    )
    samples = show(written, live=config.num_samples == 1)
    for sample in samples if config.logprobs else []:
        print(f"log-probability per token: {sum(sample.logprobs) / len(sample.ids):.4f} nats")


def show(written: Iterator[list[Completion]], live: bool) -> list[Completion]:
    """Prints the samples and returns them; with `live` the only sample is printed as it is generated."""
    shown = 0
    for samples in written:
        if live:
            text = samples[0].prompt + samples[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
    if live:
        print()
    else:
        print("\n---------------\n".join(sample.prompt + sample.text for sample in samples))
    return samples


if __name__ == "__main__":
    cli.run(main)
