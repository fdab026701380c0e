"""Continue a prompt with a trained model, or talk to one that is fine-tuned for chat.

    python recipes/sample.py --model runs/quickstart --prompt 'def '
    python recipes/sample.py --model runs/chat_sft --chat true

`--model` is a run's folder, the directory of any causal language model, or a Hub id such as
openai-community/gpt2. A single sample is streamed token by token. `--dtype bfloat16` halves the
memory traffic per token. `--chat` answers each line of the terminal, or of a file that is piped in,
until its end (Ctrl-D); `--prompt` is then the first line.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2_accel import cli
from gpt2_accel.config import ModelChoice, parse_config, setting
from gpt2_accel.data.chat_tokens import prompt_tokens
from gpt2_accel.generation.chat import answer
from gpt2_accel.generation.sampling import Completion, Sampling, load, stream, user_turn
from gpt2_accel.models import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Sample(ModelChoice, Sampling):
    prompt: str = setting("", "text to continue; empty for the start of a text")
    num_samples: int = setting(3, "number of continuations")
    dtype: str = setting("float32", "dtype of the weights: 'float32' or 'bfloat16'")
    chat: bool = setting(False, "talk to a model that has a chat template")
    system: str = setting("", "system prompt of a chat")


def main() -> None:
    config = parse_config(Sample)
    model, tokenizer = load(
        config.model, config.dtype, verify=config.verify, model_class=config.model_class
    )
    if config.chat:
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused alone
        talk(model, tokenizer, config)
        return
    if tokenizer.chat_template and sys.stdin.isatty():
        print("this model has a chat template: --chat true talks to it", file=sys.stderr)
    written = stream(model, tokenizer, [config.prompt], config)
    show(written, live=config.num_samples == 1)


def talk(model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", config: Sample) -> None:
    """Answers the lines of the terminal until its end; a line that cannot be answered is left out
    of the conversation."""
    live = sys.stdin.isatty()
    system = {"role": "system", "content": config.system}
    messages = [system] if config.system.strip() else []
    prompt_tokens(tokenizer, messages + user_turn("Hi"))  # refuses a system prompt at once
    for line in lines(config.prompt, "> " if live else ""):
        said = messages + user_turn(line)
        try:
            shown = ""
            dropped, written = answer(model, tokenizer, said, config)
            if dropped:
                note = f"the first {dropped} messages are no longer read: the conversation is longer than the model reads"
                print(f"({note})", file=sys.stderr)
            for (completion,) in written:
                print(completion.text[len(shown) :], end="", flush=True)
                shown = completion.text
            print(flush=True)
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print()
        except ValueError as error:
            print(f"sample.py: {error}", file=sys.stderr)
            continue
        if shown.strip():
            messages = said
            messages.append({"role": "assistant", "content": shown})


def lines(first: str, sign: str) -> Iterator[str]:
    """Yields `first` if there is one, then the lines of the terminal after `sign`; empty ones are
    left out."""
    if first:
        yield first
    while True:
        try:
            line = input(sign)
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def show(written: Iterator[list[Completion]], live: bool) -> None:
    """Prints the samples; with `live` the only sample is printed as it is generated."""
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


if __name__ == "__main__":
    cli.run(main)
