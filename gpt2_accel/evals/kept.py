"""What fine-tuning keeps of the base model: an estimate of KL(base ‖ tuned), in nats per token.

The base samples a text after each of `PROMPTS`, once. The estimate is the mean, over the sampled
tokens, of log p(base) - log p(tuned): it is unbiased, and 0 for the base itself. The validation
loss cannot show what is forgotten: it also falls while a model loses everything else.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from gpt2_accel.checkpoint.find import model_directory
from gpt2_accel.evals.formulas import mean
from gpt2_accel.generation.sampling import (
    Prompt,
    Sampling,
    complete,
    encode_prompt,
    user_turn,
)
from gpt2_accel.hf.convert import local_directory
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, load_tokenizer

# Several languages and kinds of text. A chat model gets each as a message of the user.
PROMPTS = (
    "What is the capital of Italy?",
    "Why is the sky blue?",
    "How many days are there in a week?",
    "What is 17 + 25?",
    "Give me three tips for better sleep.",
    "Write a short poem about the sea.",
    "Translate into French: Good morning, my friend.",
    "Once upon a time there was a",
    "The three most important causes of the war were",
    "Dear Sir or Madam,",
    "def fibonacci(n):",
    "SELECT name, price FROM",
    "Quelle est la capitale de l'Espagne ?",
    "Warum fällt im Winter Schnee?",
    "¿Quién escribió Don Quijote?",
    "中国的首都是",
)
NEW_TOKENS = 32  # sampled after each prompt, at temperature 1
SHOWN = 2  # prompts whose greedy answers are shown before and after
# Nats per token. Below the first, models of a study kept their general knowledge; between the two
# they kept 19 to 29 of 26 right answers, in another form; above the second at most 13
# (docs/chat.md).
KEEPS = 0.7
LOSES = 1.35


def sample_base(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    base: str,
    interrupted: Callable[[], object] = lambda: False,
    shown: Sequence[Prompt] = (),
) -> dict[str, Any]:
    """Samples `NEW_TOKENS` tokens after each of the `PROMPTS`, at temperature 1.

    The prompts are conversations if the directory or Hub model `base` has a chat template. Those
    that the tokenizer cannot encode, or that leave no room for the new tokens, are left out.

    Returns an empty dict if none is left or `interrupted`, or `texts`: for each a list of the
    prompt's token ids and of the sampled ones, up to the end of a text; their `nats`, from
    `sample_nats`; `SHOWN` prompts, first those `shown`, and the model's `answers` to them.
    """
    directory = local_directory(model_directory(base))
    is_there = (directory / "tokenizer.json").exists()
    chat = is_there and load_tokenizer(directory).chat_template is not None
    prompts: list[Prompt] = []
    for text in PROMPTS:
        prompt: Prompt = user_turn(text) if chat else text
        with suppress(ValueError):  # a character that is not in the vocabulary
            if len(encode_prompt(tokenizer, prompt)) + NEW_TOKENS <= model.config.n_positions:
                prompts.append(prompt)
    sampling = Sampling(NEW_TOKENS, temperature=1.0, top_k=0)
    # Seeds of their own: the errors of the texts are independent.
    found = complete(model, tokenizer, prompts, sampling, interrupted, range(len(prompts)))
    if not found:
        return {}
    texts = [[encode_prompt(tokenizer, each.prompt), each.ids] for each in found]
    prompts = [*shown, *prompts][:SHOWN]
    return {
        "texts": texts,
        "nats": sample_nats(model, texts),
        "learns_chat": tokenizer.chat_template is not None and not chat,
        "prompts": prompts,
        "answers": answers(model, tokenizer, prompts),
    }


@torch.no_grad()
def sample_nats(model: LanguageModel, texts: Sequence[list[list[int]]]) -> list[float]:
    """Returns the loss of each text's sampled tokens, summed, in nats; reads one by one."""
    nats = []
    with evaluating(model):
        for prompt, sampled in texts:
            ids = torch.tensor([prompt + sampled], device=model.device)
            targets = ids[:, 1:].clone()
            targets[:, : len(prompt) - 1] = -100
            nats.append(model(ids[:, :-1], targets, reduction="none").float().sum().item())
    return nats


def answers(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[str]:
    """Returns the greedy continuation of each prompt, `NEW_TOKENS` tokens at most."""
    sampling = Sampling(NEW_TOKENS, temperature=0)
    return [each.text.strip() for each in complete(model, tokenizer, prompts, sampling)]


def compare(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, base: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """Returns `val/kept`, its standard error over the texts, and the model's answers.

    `base` is from `sample_base`.
    """
    nats = zip(sample_nats(model, base["texts"]), base["nats"], strict=True)
    counts = [len(sampled) for _, sampled in base["texts"]]
    results = mean([new - old for new, old in nats], counts, "val/kept")
    return results, answers(model, tokenizer, base["prompts"])


def verdict(
    results: Mapping[str, float],
    base: Mapping[str, Any],
    after: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Returns what `val/kept` means, and the answers of the base and of the tuned model.

    A prompt in `base` that is token ids is from the data's validation split.
    """
    nats = results["val/kept"]
    words = "still answers as before"
    if nats > KEEPS and base.get("learns_chat"):
        words = "writes in another form than its base, which had no chat template"
    elif nats > LOSES:
        words = "no longer answers as before: lower --learning_rate, or take fewer --epochs"
    elif nats > KEEPS:
        words = "answers in another form, and may have lost knowledge: compare its answers"
    lines = [f"beside what it was trained on, the model {words} (val/kept {nats:.2f})"]
    for prompt, own, new in zip(base["prompts"], base["answers"], after, strict=True):
        text = prompt
        if isinstance(prompt[0], int):
            text = str(tokenizer.decode(prompt, skip_special_tokens=True))
            text = f"held out: {' '.join(text.split())}"
        elif not isinstance(prompt, str):
            text = prompt[0]["content"]
        lines += [text, f"  before: {own!r}", f"  after:  {new!r}"]
    return "\n".join(lines)
