"""Text generation: `complete` returns texts, `stream` and `tokens` yield text and ids by token.

`load` loads a model and its tokenizer. `kv_cache.py` has the forward of one token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.config import WEIGHT_DTYPES, Sampling
from gpt2_accel.data.chat_tokens import prompt_tokens
from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.hf.convert import from_pretrained
from gpt2_accel.models import LanguageModel, convert_parameters, evaluating
from gpt2_accel.runtime.device import best_device
from gpt2_accel.tokenizer import (
    PreTrainedTokenizerBase,
    check_vocabulary,
    encode,
    load_tokenizer,
    text_ends,
    text_start,
)

# A text to continue, the messages of a conversation to answer, each with `role` and `content`, or
# token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


def load(
    name: str,
    dtype: str = "float32",
    *,
    verify: bool = True,
    model_class: str | None = None,
    base: str | None = None,
) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """Loads a model in evaluation mode, on the GPU if there is one, and its tokenizer.

    `name` is a run's folder (for its newest weights), an HF model directory or a Hub id. `dtype` of
    the weights is one of `WEIGHT_DTYPES`, `model_class` and `base` as in `from_pretrained`,
    `verified_directory` describes `verify`. Raises `FileNotFoundError` if there is no model or
    tokenizer, and `ValueError` for another dtype or a damaged or unsupported model.
    """
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(WEIGHT_DTYPES)}, got {dtype!r}")

    directory = verified_directory(name, verify)
    model = from_pretrained(directory, model_class=model_class, base=base)
    tokenizer = load_tokenizer(directory)
    check_vocabulary(tokenizer, model.config.vocab_size, name)
    convert_parameters(model, getattr(torch, dtype))
    return model.to(best_device()).eval(), tokenizer


@dataclass
class Completion:
    """One continuation of a prompt.

    `ids` are the new tokens, including the one that ended the text, and `text` is their text, cut
    before a stop string. `ended` is "end_of_text", "stop" or "length", or None while the text is
    incomplete.
    """

    prompt: Prompt
    text: str = ""
    ids: list[int] = field(default_factory=list)
    ended: str | None = None


def complete(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    interrupted: Callable[[], object] = lambda: False,
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Returns `sampling.num_samples` continuations of each prompt, in order.

    An empty prompt starts a new text. `interrupted` is called after each token; if it is true, the
    result is empty. `seeds` as in `tokens`. Raises `ValueError` for a prompt that cannot be
    encoded, and for logits that are not finite.
    """
    written: list[Completion] = []
    for completions in stream(model, tokenizer, prompts, sampling, seeds) if prompts else ():
        if interrupted():
            return []
        written = completions
    return written


def stream(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
) -> Iterator[list[Completion]]:
    """Yields the completions after each token, as a list of the same objects, one token longer.

    `complete` describes the arguments. A text only grows: a possible start of a stop string and the
    first bytes of a character are held back.
    """
    completions = [Completion(prompt) for prompt in prompts for _ in range(sampling.num_samples)]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    for ids in tokens(model, prompt_ids, sampling, seeds):
        for completion, token in zip(completions, ids, strict=True):
            if completion.ended is None:
                completion.ids.append(token)
                update_text(completion, tokenizer, sampling)
        yield completions
        if all(completion.ended for completion in completions):
            return


def update_text(
    completion: Completion, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> None:
    """Updates `text` and `ended` after a token is appended."""
    ids = completion.ids
    if ids[-1] in text_ends(tokenizer):
        completion.ended = "end_of_text"
        ids = ids[:-1]
    elif len(ids) == sampling.max_new_tokens:
        completion.ended = "length"
    text = str(tokenizer.decode(ids))
    stops = [text.find(stop) for stop in sampling.stop if stop in text]
    if stops:
        completion.ended = "stop"
        text = text[: min(stops)]
    if completion.ended is None:
        text = text.rstrip("\ufffd")  # the first bytes of a character
        held = 0
        for stop in sampling.stop:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    held = max(held, length)
        text = text[: len(text) - held]
    completion.text = text


def whole_text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """Returns the prompt and its continuation as one text.

    The text of a conversation includes the special tokens of the chat template.
    """
    if isinstance(completion.prompt, str):
        return completion.prompt + completion.text
    return str(tokenizer.decode(encode_prompt(tokenizer, completion.prompt) + completion.ids))


def user_turn(text: str) -> list[dict[str, str]]:
    """Returns a conversation of one message, `text` by the user, as a prompt."""
    return [{"role": "user", "content": text}]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Returns the token ids of a prompt; an empty prompt becomes the token that begins documents.

    Raises `ValueError` for an empty prompt without such a token, a character that is not in the
    vocabulary, or a conversation that `prompt_tokens` refuses.
    """
    if not isinstance(prompt, str):
        ids: Any = prompt
        return ids if ids and isinstance(ids[0], int) else prompt_tokens(tokenizer, ids)
    ids = encode(tokenizer, [prompt])[0]
    ids = text_start(tokenizer, begins=not ids) + ids
    if not ids:
        raise ValueError("this tokenizer has no token that starts a text: give a prompt")
    return ids


@torch.no_grad()
def tokens(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    nats: list[torch.Tensor] | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of each sample, `sampling.max_new_tokens` times.

    A prompt has at least one token. Sample i of a prompt has the seed of the prompt + i. `seeds`
    has one for each prompt; by default all have `sampling.seed`, and the errors of a figure over
    several prompts are not independent. `nats` gets -log p of each step's tokens, (samples,) fp32,
    by the model's own distribution. Ignores `sampling.stop`, which `stream` compares with the text.
    Raises `ValueError` for logits that are not finite.
    """
    n_positions = model.config.n_positions
    rows = []
    generators = []
    for prompt, seed in zip(prompts, seeds or [sampling.seed] * len(prompts), strict=True):
        for i in range(sampling.num_samples):
            rows.append(prompt[-n_positions:])
            generators.append(torch.Generator(model.device).manual_seed(seed + i))
    with evaluating(model):
        slots = 0
        if sampling.compile and len(rows) == 1:
            longest = max(256, len(rows[0]) + sampling.max_new_tokens)
            # Few lengths, since each is compiled: powers of two.
            slots = min(n_positions, 1 << (longest - 1).bit_length())
        cache = KVCache(model, slots)
        next_ids = None
        for _ in range(sampling.max_new_tokens):
            if next_ids is not None and cache.end < n_positions:
                logits = cache.read(next_ids[:, None])
            else:
                half = max(1, n_positions // 2)
                rows = [row[-half:] if len(row) > n_positions else row for row in rows]
                logits = cache.start(rows)
            next_ids = sample_next(logits.float(), sampling, generators)
            if nats is not None:
                nats.append(cross_entropy(logits.float(), next_ids, reduction="none"))
            ids = next_ids.tolist()
            for row, token in zip(rows, ids, strict=True):
                row.append(token)
            yield ids


def sample_next(
    logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> torch.Tensor:
    """Samples one token per row with the row's generator: fp32 logits (B, V) -> (B,) int64.

    Raises `ValueError` for logits that are not finite.
    """
    if not logits.sum().isfinite():
        raise ValueError(
            "the model's logits are not finite: its weights are damaged, or its training diverged; "
            "take an earlier checkpoint"
        )
    if sampling.temperature < 1e-6:  # greedy: a smaller divisor underflows in fp32
        return logits.argmax(dim=-1)
    ids = None
    if sampling.top_k or sampling.top_p < 1:
        vocab_size = logits.shape[1]
        logits, ids = logits.topk(min(sampling.top_k or vocab_size, vocab_size))  # likeliest first
    probabilities = (logits / sampling.temperature).softmax(dim=-1)
    if sampling.top_p < 1:
        # Drop a token if the probabilities before it reach top_p; the first token always stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    rows = zip(probabilities, generators, strict=True)
    drawn = torch.stack([row.multinomial(1, generator=generator) for row, generator in rows])
    return (drawn if ids is None else ids.gather(-1, drawn)).squeeze(-1)
