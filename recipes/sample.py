"""Continue a prompt with a trained model, or chat with a model that is fine-tuned for it.

    python recipes/sample.py --model runs/quickstart --prompt 'def '
    python recipes/sample.py --model runs/chat_sft

`--model` is a run's folder, the directory of any causal language model, or a Hub id such as
openai-community/gpt2. A single sample is printed token by token. `--dtype bfloat16` halves the
memory traffic per token. A chat model that was trained here answers each line that you type, or
each line of a piped file, until Ctrl-D or the end of the file; `--prompt` is then the first line.
Another model with a chat template does so with `--chat`.
"""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2_accel import cli
from gpt2_accel.config import ModelChoice, Sampling, parse_config, setting
from gpt2_accel.runtime.options import run_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gpt2_accel.generation.sampling import Completion
    from gpt2_accel.models import LanguageModel


@dataclass
class Sample(ModelChoice, Sampling):
    prompt: str = setting("", "text to continue; empty for the start of a text")
    num_samples: int = setting(3, "number of continuations")
    dtype: str = setting("float32", "dtype of the weights: 'float32' or 'bfloat16'")
    chat: bool | None = setting(
        None, "chat with a model that has a chat template; default for a chat run"
    )
    system: str = setting("", "system prompt of the chat")


def main() -> None:
    config = parse_config(Sample)
    from gpt2_accel.generation.sampling import complete, load, stream

    model, tokenizer = load(
        config.model,
        config.dtype,
        verify=config.verify,
        model_class=config.model_class,
        base=config.base,
    )
    _, run = run_of(config.model)
    if config.chat or (config.chat is None and run.get("chat")):
        chat(model, tokenizer, config)
        return
    if tokenizer.chat_template and config.chat is None:
        print("this model has a chat template: --chat true starts a chat", file=sys.stderr)
    if config.num_samples > 1:
        samples = complete(model, tokenizer, [config.prompt], config)
        print("\n---------------\n".join(config.prompt + sample.text for sample in samples))
        return
    for piece in pieces(stream(model, tokenizer, [config.prompt], config), config.prompt):
        print(piece, end="", flush=True)
    print()


def chat(model: "LanguageModel", tokenizer: "PreTrainedTokenizerBase", config: Sample) -> None:
    """Answers each line of standard input, until its end. A line that cannot be answered does not
    become part of the conversation."""
    from gpt2_accel.data.chat_tokens import prompt_tokens
    from gpt2_accel.generation.chat import answer
    from gpt2_accel.generation.sampling import user_turn

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # only a line that is not UTF-8 is refused
    sign = "> " if sys.stdin.isatty() else ""
    messages = []
    if config.system.strip():
        messages.append({"role": "system", "content": config.system})
    prompt_tokens(tokenizer, messages + user_turn("Hi"))  # refuses a system prompt at once
    for line in lines(config.prompt, sign):
        question = messages + user_turn(line)
        text = ""
        try:
            dropped, written = answer(model, tokenizer, question, config)
            if dropped:
                print(
                    "(the conversation is longer than the model reads: it no longer sees the "
                    f"first {dropped} messages)",
                    file=sys.stderr,
                )
            for piece in pieces(written):
                print(piece, end="", flush=True)
                text += piece
            print(flush=True)
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print()
        except ValueError as error:
            print(f"sample.py: {error}", file=sys.stderr)
            continue
        if text.strip():
            messages = question
            messages.append({"role": "assistant", "content": text})


def lines(first: str, sign: str) -> Iterator[str]:
    """Yields `first`, then the lines of standard input, without empty ones; each line is asked for
    with `sign`."""
    if first:
        yield first
    while True:
        try:
            line = input(sign)
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def pieces(written: "Iterator[list[Completion]]", prompt: str = "") -> Iterator[str]:
    """Yields the prompt and the only completion in pieces, as the text is generated."""
    shown = 0
    for [completion] in written:
        text = prompt + completion.text
        yield text[shown:]
        shown = len(text)


if __name__ == "__main__":
    cli.run(main)
