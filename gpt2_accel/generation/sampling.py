"""Text generation: `complete` returns whole texts, `stream` yields them token by token, `tokens` yields token ids.

`load` loads a model and its tokenizer.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gpt2_accel import kernels
from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.config import check_ranges, setting
from gpt2_accel.device import attention_order, best_device
from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.hf.convert import from_pretrained
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.tokenizer import check_vocabulary, encode, load_tokenizer, prompt_tokens, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_PROMPT = 50_000  # characters of a prompt, far more than the positions of GPT-2 hold
OVERFLOW = ("slide", "error")
# A text to continue, or the messages of a conversation, each with `role` and `content`, which the assistant answers.
Prompt = str | Sequence[Mapping[str, str]]
NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or its training diverged; take an "
    "earlier checkpoint"
)


def load(
    name: str, dtype: str = "float32", *, verify: bool = True
) -> "tuple[LanguageModel, PreTrainedTokenizerBase]":
    """Loads a model in evaluation mode, on the GPU if there is one, and its tokenizer.

    `name` is a run's folder (for its newest weights), an HF model directory or a Hub id. `dtype` of the weights is
    a name in `DTYPES`. Raises `ValueError` for another, and the errors of `verified_directory`, which takes `verify`,
    `from_pretrained` and `load_tokenizer`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    directory, device = verified_directory(name, verify), best_device()
    kernels.choose(sdpa_order=attention_order(device, deterministic=False))
    model = from_pretrained(directory).to(device, DTYPES[dtype]).eval()
    tokenizer = load_tokenizer(directory)
    check_vocabulary(tokenizer, model.config.vocab_size, name)
    return model, tokenizer


@dataclass
class Sampling:
    """Sampling parameters.

    Sample i of a prompt has its own random generator with the seed `seed` + i. Other prompts and the number of samples
    do not change it, up to rounding, and torch's global random state is not used.

    `top_p` is nucleus sampling (Holtzman et al., 2020). When a text reaches `n_positions`, `overflow` "slide" drops its
    older half and recomputes the KV cache; "error" refuses a prompt that is too long for `max_new_tokens`.

    Raises `ValueError` for a value out of its range.
    """

    max_new_tokens: int = setting(200, "longest continuation, in tokens")
    temperature: float = setting(0.8, "lower is more conservative; 0 is greedy")
    top_k: int = setting(50, "keep the k likeliest tokens; 0 keeps all")
    top_p: float = setting(1.0, "keep the likeliest tokens that together reach this probability")
    num_samples: int = setting(1, "continuations of each prompt")
    seed: int = setting(1337, "same seed, same text; the second sample is the first of seed + 1")
    stop: list[str] = setting([], "strings that end a continuation, beside <|endoftext|>")
    overflow: str = setting("slide", "past the model's positions: 'slide' on, or 'error'")

    def __post_init__(self) -> None:
        check_ranges(
            self, positive="max_new_tokens num_samples", not_negative="temperature top_k seed"
        )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if "" in self.stop:
            raise ValueError("stop holds an empty string: leave it out")
        if self.overflow not in OVERFLOW:
            raise ValueError(f"overflow must be 'slide' or 'error', got {self.overflow!r}")


@dataclass
class Completion:
    """One continuation of a prompt.

    `ids` are the new tokens, including the one that ended the text, and `text` is their text, cut before a stop string.
    `logprobs`, if requested, are log-probabilities of `ids` in nats, before temperature, top-k and top-p. `ended` is
    "end_of_text", "stop" or "length", or None while the text is incomplete.
    """

    prompt: Prompt
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None


def complete(
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    logprobs: bool = False,
    compile: bool = False,
) -> list[Completion]:
    """Returns `sampling.num_samples` continuations of each prompt, in order.

    An empty prompt starts a new text. `compile` is passed to `KVCache`. Raises `ValueError` for an empty prompt if the
    tokenizer has no `<|endoftext|>`, for a character that is not in the vocabulary, and the errors of `tokens`.
    """
    written = stream(model, tokenizer, prompts, sampling, logprobs=logprobs, compile=compile)
    return deque(written, maxlen=1).pop() if prompts else []


def stream(
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    logprobs: bool = False,
    compile: bool = False,
    cache: KVCache | None = None,
) -> Iterator[list[Completion]]:
    """Like `complete`, but yields after each token; the list holds the same objects each time, one token longer.

    `cache` is passed to `tokens`.

    A text only grows: a possible start of a stop string and the first bytes of a character are held back.
    """
    completions = [Completion(prompt) for prompt in prompts for _ in range(sampling.num_samples)]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    options = {"logprobs": logprobs, "compile": compile, "cache": cache}
    for step in tokens(model, prompt_ids, sampling, **options):
        for completion, token, logprob in zip(completions, *step, strict=True):
            if completion.ended is None:
                completion.ids.append(token)
                if logprobs:
                    completion.logprobs.append(logprob)
                update_text(completion, tokenizer, sampling)
        yield completions
        if all(completion.ended for completion in completions):
            return


def update_text(
    completion: Completion, tokenizer: "PreTrainedTokenizerBase", sampling: Sampling
) -> None:
    """Updates `text` and `ended` after a token is appended."""
    ids = completion.ids
    if ids[-1] == tokenizer.eos_token_id:
        completion.ended, ids = "end_of_text", ids[:-1]
    elif len(ids) == sampling.max_new_tokens:
        completion.ended = "length"
    text = tokenizer.decode(ids)
    stops = [text.find(stop) for stop in sampling.stop if stop in text]
    if stops:
        completion.ended, text = "stop", text[: min(stops)]
    if completion.ended is None:
        text = text.rstrip("\ufffd")  # the first bytes of a character
        held = max((overlap(text, stop) for stop in sampling.stop), default=0)
        text = text[: len(text) - held]
    completion.text = text


def whole_text(tokenizer: "PreTrainedTokenizerBase", completion: Completion) -> str:
    """Returns the prompt and its continuation as one text; of a conversation with the marks of its chat template."""
    if isinstance(completion.prompt, str):
        return completion.prompt + completion.text
    return tokenizer.decode(encode_prompt(tokenizer, completion.prompt) + completion.ids)


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def user_turn(text: str) -> list[dict[str, str]]:
    """Returns the conversation in which the user has said `text`, as a prompt."""
    return [{"role": "user", "content": text}]


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> list[int]:
    """Returns the token ids of a prompt; an empty prompt becomes `<|endoftext|>`, which starts a text.

    Raises `ValueError` for a prompt of more than `MAX_PROMPT` characters, and for an empty one without such a token.
    """
    is_text = isinstance(prompt, str)
    kind = "prompt" if is_text else "message"
    size = len(prompt) if is_text else max((len(m["content"]) for m in prompt), default=0)
    if size > MAX_PROMPT:
        raise ValueError(
            f"the {kind} has {size:,} characters: shorten it to at most {MAX_PROMPT:,}"
        )
    if not is_text:
        return prompt_tokens(tokenizer, prompt)
    ids = encode(tokenizer, [prompt])[0]
    if not ids and (start := text_start(tokenizer)) is None:
        raise ValueError("this tokenizer has no token that starts a text: give a prompt")
    return ids or [start]


@torch.no_grad()
def tokens(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    *,
    logprobs: bool = False,
    compile: bool = False,
    cache: KVCache | None = None,
) -> Iterator[tuple[list[int], list[float]]]:
    """Yields the next token of each sample and its log-probability (0 if not requested), `sampling.max_new_tokens`
    times. `sampling.stop` is ignored: it concerns text, see `stream`. A `cache` that has read the prompts already gets the
    new tokens, and has to have room for them.

    Raises `ValueError` for an empty prompt, for one that is too long if `overflow` is "error", and for logits that are
    not finite.
    """
    n_positions = model.config.n_positions
    rows = [list(prompt) for prompt in prompts]
    if not rows:
        return
    check_lengths(rows, sampling, n_positions)
    generators = [
        torch.Generator(model.device).manual_seed(sampling.seed + i)
        for _ in rows
        for i in range(sampling.num_samples)
    ]
    with evaluating(model):
        rows = [row[-n_positions:] for row in rows]
        slots = min(n_positions, max(map(len, rows)) + sampling.max_new_tokens)
        if cache is None:
            cache = KVCache(model, rows, slots, compile=compile)
            cache.repeat(sampling.num_samples)
        rows = [list(row) for row in rows for _ in range(sampling.num_samples)]
        for left in range(sampling.max_new_tokens, 0, -1):
            logits = cache.logits.float()
            next_ids = choose(logits, sampling, generators)
            ids = next_ids.tolist()
            if -1 in ids:
                raise ValueError(NOT_FINITE)
            yield ids, chosen_logprobs(logits, next_ids).tolist() if logprobs else [0.0] * len(ids)
            if left == 1:
                return
            for row, token in zip(rows, ids, strict=True):
                row.append(token)
            if cache.end < n_positions:
                cache.append(next_ids[:, None])
            else:
                rows = [slide(row, n_positions) for row in rows]
                slots = min(n_positions, max(map(len, rows)) + left)
                cache = KVCache(model, rows, slots, compile=compile)


def check_lengths(rows: list[list[int]], sampling: Sampling, n_positions: int) -> None:
    """Raises `ValueError` for an empty prompt, or if `overflow` is "error" for one that is too long."""
    if not all(rows):
        raise ValueError("the prompt has no tokens: give at least one")
    longest = max(map(len, rows))
    if sampling.overflow == "error" and longest + sampling.max_new_tokens > n_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed the model's "
            f"n_positions ({n_positions}): shorten the prompt, lower max_new_tokens, or let overflow be "
            "'slide'"
        )


def slide(row: list[int], n_positions: int) -> list[int]:
    """Drops the older half of a row that is longer than `n_positions`; other rows are unchanged."""
    return row[-max(1, n_positions // 2) :] if len(row) > n_positions else row


def choose(
    logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> torch.Tensor:
    """Samples one token per row with the row's generator: fp32 logits (B, V) -> (B,) int64, -1 where the logits are not
    finite.
    """
    broken = ~logits.sum(dim=-1).isfinite()
    if sampling.temperature < 1e-6:  # greedy: a smaller divisor underflows in fp32
        return logits.max(dim=-1).indices.masked_fill(broken, -1)
    ids = None
    if sampling.top_k or sampling.top_p < 1:
        kept = min(sampling.top_k or logits.shape[1], logits.shape[1])
        logits, ids = logits.topk(kept)  # the likeliest first
    # Subtract the maximum first, so that a low temperature does not overflow.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / sampling.temperature
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        # Drop a token if the probabilities before it reach top_p; the first token always stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    # The argmax of p/e with e ~ Exp(1) is a sample from p. torch.multinomial does the same, but synchronises with the
    # device. The clamp avoids 0/0.
    noise = [
        torch.empty_like(row).exponential_(generator=generator)
        for row, generator in zip(probabilities, generators, strict=True)
    ]
    choice = (probabilities / torch.stack(noise).clamp(min=1e-20)).argmax(dim=-1, keepdim=True)
    choice = choice if ids is None else ids.gather(-1, choice)
    return choice.squeeze(-1).masked_fill(broken, -1)


def chosen_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of `ids` in nats: logits (B, V), ids (B,) -> (B,)."""
    return logits.log_softmax(dim=-1).gather(-1, ids[:, None]).squeeze(-1)
