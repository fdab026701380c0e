"""Text generation: `complete` returns whole texts, `stream` yields them token by token, `tokens` yields only the ids.

`load` finds the model and the tokenizer that they take.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from gpt2_accel.checkpoint.find import model_directory
from gpt2_accel.config import check_ranges, setting
from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.hf.convert import from_pretrained
from gpt2_accel.models import LanguageModel
from gpt2_accel.tokenizer import encode, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OVERFLOW = ("slide", "error")
NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or its training diverged; take an "
    "earlier checkpoint"
)


def load(name: str, dtype: str = "float32") -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """A model to write with, and its tokenizer: in evaluation mode, on the GPU if there is one.

    `name` is a run's folder, for its newest weights, an HF GPT-2 directory or a Hub id; `dtype`, of the
    weights, a name in `DTYPES`. Raises `ValueError` for another, and what `from_pretrained` and
    `load_tokenizer` raise.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    directory = model_directory(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = from_pretrained(directory).to(device, DTYPES[dtype]).eval()
    return model, load_tokenizer(directory)


@dataclass
class Sampling:
    """How text is continued. Sample i of a prompt is drawn with the seed `seed` + i and by itself: neither
    other prompts nor the number of samples change it (but for rounding), nor does it touch torch's global
    random state.

    `top_p` is the nucleus of Holtzman et al. (2020). Past `n_positions`, `overflow` "slide" drops the
    older half of a row, as often as the positions are used up, and reads the rest anew; "error" refuses
    a prompt that is too long for that many new tokens.

    Raises `ValueError` for a value out of its range.
    """

    max_new_tokens: int = setting(200, "longest continuation, in tokens")
    temperature: float = setting(0.8, "below 1 safer, above 1 wilder, 0 always the likeliest token")
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
    """One continuation of a prompt. `text` is that of `ids`, cut before a stop string.

    `ids` are the new tokens, with the one that ended the text; `logprobs` the log-probability of each in
    nats, before temperature, top-k and top-p, where they were asked for. `ended` says by what it ended,
    "end_of_text", "stop" or "length"; None while it is being written.
    """

    prompt: str
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None


def complete(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    logprobs: bool = False,
    compile: bool = False,
) -> list[Completion]:
    """The continuations of all prompts, `sampling.num_samples` of each, in order.

    An empty prompt stands for the start of a text. `compile` is that of `KVCache`.
    Raises `ValueError` for an empty prompt where the tokenizer has no `<|endoftext|>` to stand for it,
    for a character that the tokenizer does not know, and what `tokens` raises.
    """
    written = stream(model, tokenizer, prompts, sampling, logprobs=logprobs, compile=compile)
    return deque(written, maxlen=1).pop() if prompts else []


def stream(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    logprobs: bool = False,
    compile: bool = False,
) -> Iterator[list[Completion]]:
    """`complete`, token by token: yields the same continuations each time, each one token longer.

    A text only ever grows: what may yet turn out as part of a stop string or of an unfinished character
    is held back.
    """
    completions = [Completion(prompt) for prompt in prompts for _ in range(sampling.num_samples)]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    for step in tokens(model, prompt_ids, sampling, logprobs=logprobs, compile=compile):
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
    completion: Completion, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> None:
    """Sets `text` and `ended` after one more token."""
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


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` could be the beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The ids of a prompt; those of an empty one are `<|endoftext|>`, after which a text starts."""
    ids = encode(tokenizer, [prompt])[0]
    if not ids and tokenizer.eos_token_id is None:
        raise ValueError("this tokenizer has no token that starts a text: give a prompt")
    return ids or [tokenizer.eos_token_id]


@torch.no_grad()
def tokens(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    *,
    logprobs: bool = False,
    compile: bool = False,
) -> Iterator[tuple[list[int], list[float]]]:
    """The next token of each sample of each prompt, `sampling.max_new_tokens` times, and their
    log-probabilities (0 where not asked for). It knows no text: `stop` is for `stream` to look at.

    Raises `ValueError` for a prompt without tokens, one too long where `overflow` is "error", and where
    the logits are not finite.
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
                cache.append(next_ids)
            else:
                rows = [slide(row, n_positions) for row in rows]
                slots = min(n_positions, max(map(len, rows)) + left)
                cache = KVCache(model, rows, slots, compile=compile)


def check_lengths(rows: list[list[int]], sampling: Sampling, n_positions: int) -> None:
    """Raises `ValueError` for a prompt without tokens, or one too long where that is an error."""
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
    """A row that has outgrown the positions without its older half; others as they are."""
    return row[-max(1, n_positions // 2) :] if len(row) > n_positions else row


def choose(
    logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> torch.Tensor:
    """One token per row, each with the row's generator: fp32 logits (B, V) -> (B,) int64.

    -1 stands for a row whose logits are not finite.
    """
    broken = ~logits.sum(dim=-1).isfinite()
    if sampling.temperature < 1e-6:  # as good as 0, and a divisor that fp32 still holds
        return logits.max(dim=-1).indices.masked_fill(broken, -1)
    ids = None
    if sampling.top_k or sampling.top_p < 1:
        kept = min(sampling.top_k or logits.shape[1], logits.shape[1])
        logits, ids = logits.topk(kept)  # the likeliest first
    # The largest is taken off first, so that a low temperature does not overflow.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / sampling.temperature
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        # Drop a token once those before it reach top_p; the first always stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    # p/e with e ~ Exp(1) is largest at each token with probability p, a race of exponential clocks:
    # what torch.multinomial does, without its wait for the device. A drawn 0 would turn 0/0 into NaN.
    noise = [
        torch.empty_like(row).exponential_(generator=generator)
        for row, generator in zip(probabilities, generators, strict=True)
    ]
    choice = (probabilities / torch.stack(noise).clamp(min=1e-20)).argmax(dim=-1, keepdim=True)
    choice = choice if ids is None else ids.gather(-1, choice)
    return choice.squeeze(-1).masked_fill(broken, -1)


def chosen_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's token, in nats: logits (B, V), ids (B,) -> (B,)."""
    return logits.log_softmax(dim=-1).gather(-1, ids[:, None]).squeeze(-1)


@torch.no_grad()
def likeliest(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int = 10
) -> list[tuple[int, float]]:
    """The `count` likeliest next tokens after a prompt, by id, with their probabilities.

    Of a prompt that is too long it sees the last `n_positions` tokens. Raises what `complete` raises.
    """
    ids = encode_prompt(tokenizer, prompt)[-model.config.n_positions :]
    with evaluating(model):
        logits = KVCache(model, [ids], len(ids)).logits[0].float()
    if not logits.isfinite().all():
        raise ValueError(NOT_FINITE)
    probabilities, best = logits.softmax(dim=-1).topk(min(count, len(logits)))
    return list(zip(best.tolist(), probabilities.tolist(), strict=True))


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """Without dropout inside; the model's mode is as before after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
