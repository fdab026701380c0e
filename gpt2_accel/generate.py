"""Sampling text from a model."""

import torch
from transformers import PreTrainedTokenizerBase

from gpt2_accel.model import GPT
from gpt2_accel.tokenizer import encode


@torch.no_grad()
def generate(
    model: GPT,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> torch.Tensor:
    """Continues each row of `input_ids`, (B, T) with T >= 1, by `max_new_tokens` tokens.

    Returns (B, T + max_new_tokens). `temperature` 0 takes the likeliest token each time. `top_k` keeps
    the k likeliest tokens, `top_p` the likeliest that together reach that probability (Holtzman et
    al., 2020). The same seed gives the same text on the same device; torch's global random state is
    left alone. Past `n_positions` the model sees the last `n_positions` tokens.

    Raises `ValueError` for an empty prompt or a setting out of its range.
    """
    check_sampling(temperature, top_k, top_p)
    if input_ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens: give at least one")
    was_training = model.training
    model.eval()
    generator = torch.Generator(device=input_ids.device).manual_seed(seed)
    for _ in range(max_new_tokens):
        logits = model(input_ids[:, -model.config.n_positions :])[:, -1]  # (B, V)
        next_ids = sample(logits.float(), temperature, top_k, top_p, generator)
        input_ids = torch.cat((input_ids, next_ids), dim=1)
    model.train(was_training)
    return input_ids


def check_sampling(temperature: float, top_k: int | None, top_p: float) -> None:
    """Raises `ValueError` for a sampling setting out of its range."""
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}; leave it out to keep all tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def sample(
    logits: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """One token per row: logits (B, V) -> (B, 1) int64."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits, ids = (logits / temperature).sort(dim=-1, descending=True)
    if top_k is not None:
        logits, ids = logits[:, :top_k], ids[:, :top_k]
    probabilities = logits.softmax(dim=-1)
    # Drop a token once those before it reach top_p; the first always stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    choice = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return ids.gather(-1, choice)


def complete(
    model: GPT,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    *,
    num_samples: int = 1,
    **sampling,
) -> list[str]:
    """`num_samples` texts that begin with `prompt`, each cut before `<|endoftext|>` if that comes.

    `sampling` goes to `generate`. An empty prompt stands for the start of a text. Raises `ValueError`
    for an empty prompt where the tokenizer has no `<|endoftext|>` to stand for it.
    """
    prompt_ids = encode(tokenizer, [prompt])[0]
    end_of_text = tokenizer.eos_token_id
    if not prompt_ids:
        if end_of_text is None:
            raise ValueError("this tokenizer has no token that starts a text: give a prompt")
        prompt_ids = [end_of_text]
    input_ids = torch.tensor([prompt_ids] * num_samples, device=model.wte.weight.device)
    rows = generate(model, input_ids, max_new_tokens, **sampling).tolist()
    continuations = (row[len(prompt_ids) :] for row in rows)
    return [prompt + tokenizer.decode(until(ids, end_of_text)) for ids in continuations]


def until(ids: list[int], end: int | None) -> list[int]:
    """The ids before the first `end`."""
    return ids[: ids.index(end)] if end in ids else ids
