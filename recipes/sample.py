"""Continue a prompt with a trained model.

    python recipes/sample.py --model runs/quickstart --prompt 'def '

`--model` is a run's folder, any Hugging Face GPT-2 directory, or a Hub id such as openai-community/gpt2.
"""

from dataclasses import dataclass

import torch

from gpt2_accel import cli, from_pretrained
from gpt2_accel.checkpoint import model_directory
from gpt2_accel.config import parse_config, setting
from gpt2_accel.generate import complete
from gpt2_accel.tokenizer import load_tokenizer


@dataclass
class Sample:
    model: str = setting("runs/quickstart", "run's folder, HF GPT-2 directory or Hub id")
    prompt: str = setting("", "text to continue; empty for the start of a text")
    num_samples: int = setting(3, "how many continuations")
    max_new_tokens: int = setting(200, "length of each, in tokens")
    temperature: float = setting(0.8, "below 1 safer, above 1 wilder, 0 always the likeliest token")
    top_k: int | None = setting(50, "keep the k likeliest tokens")
    top_p: float = setting(1.0, "keep the likeliest tokens that together reach this probability")
    seed: int = setting(1337, "same seed, same text")


def main() -> None:
    config = parse_config(Sample)
    directory = model_directory(config.model)
    tokenizer = load_tokenizer(directory)
    model = from_pretrained(directory)
    if torch.cuda.is_available():
        model.cuda()
    texts = complete(
        model,
        tokenizer,
        config.prompt,
        config.max_new_tokens,
        num_samples=config.num_samples,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
    print("\n---------------\n".join(texts))


if __name__ == "__main__":
    cli.run(main)
