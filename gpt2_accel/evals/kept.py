"""What fine-tuning keeps of the base model: an estimate of KL(base ‖ tuned), in nats per token.

The base samples a text after each of `PROMPTS`, once. The estimate is the mean, over the sampled
tokens, of log p(base) - log p(tuned): it is unbiased, and 0 for the base itself. The validation
loss cannot show what is forgotten: it also falls while a model loses everything else.
"""

from collections.abc import Sequence

import torch

from gpt2_accel.evals.formulas import mean_loss
from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.generation.sampling import Prompt, Sampling, complete, encode_prompt, user_turn
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, text_ends

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
# Nats per token. Below the first, models of a study kept their general knowledge; between the two
# most kept it, in answers of another form; above the second none did (docs/chat.md).
KEEPS = 0.7
LOSES = 1.5


def usable_prompts(
    tokenizer: PreTrainedTokenizerBase, chat: bool, n_positions: int
) -> list[Prompt]:
    """Returns `PROMPTS`, as conversations if `chat`.

    Leaves out those that the tokenizer cannot encode, or that leave no room for the new tokens.
    """
    prompts: list[Prompt] = []
    for text in PROMPTS:
        prompt: Prompt = user_turn(text) if chat else text
        try:
            fits = len(encode_prompt(tokenizer, prompt)) + NEW_TOKENS <= n_positions
        except ValueError:  # a character that is not in the vocabulary
            continue
        if fits:
            prompts.append(prompt)
    return prompts


@torch.no_grad()
def sample_base(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples `NEW_TOKENS` tokens after each prompt, at temperature 1.

    Returns input ids and targets, (prompts, T) int64 each, on the CPU, padded at the right. The
    targets are the sampled tokens up to the end of a text, the others -100.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    rows = [list(encode_prompt(tokenizer, prompt)) for prompt in prompts]
    lengths = [len(row) for row in rows]
    with evaluating(model):
        cache = KVCache(model)
        logits = cache.start(rows)
        for left in reversed(range(NEW_TOKENS)):
            next_ids = logits.float().softmax(dim=-1).multinomial(1, generator=generator)
            for row, token in zip(rows, next_ids[:, 0].tolist(), strict=True):
                row.append(token)
            if left:
                logits = cache.read(next_ids)
    ends = set(text_ends(tokenizer))
    input_ids = torch.zeros(len(rows), max(lengths) + NEW_TOKENS - 1, dtype=torch.int64)
    targets = torch.full_like(input_ids, -100)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        last = next((n for n in range(length, len(row)) if row[n] in ends), len(row) - 1)
        input_ids[i, :last] = torch.tensor(row[:last])
        targets[i, length - 1 : last] = torch.tensor(row[length : last + 1])
    return input_ids, targets


@torch.no_grad()
def sample_nats(
    model: LanguageModel, input_ids: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Returns the sum of the losses of each row's targets, in nats, (rows,) float64 on the CPU.

    The model reads row by row, as far as a row has targets, so no row has padding.
    """
    nats = []
    with evaluating(model):
        for row, wanted in zip(input_ids, targets, strict=True):
            end = int((wanted != -100).nonzero().max()) + 1
            ids, own = (x[None, :end].to(model.device) for x in (row, wanted))
            nats.append(model(ids, own, reduction="none").double().sum())
    return torch.stack(nats).cpu()


def estimate(base: torch.Tensor, tuned: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Returns `val/kept` and its standard error over the texts, `val/kept_stderr`.

    `base` and `tuned` are from `sample_nats`, with the same targets.
    """
    counted = (targets != -100).sum(dim=1).tolist()
    results = mean_loss((tuned - base).tolist(), counted)
    return {f"val/{name.replace('loss', 'kept')}": value for name, value in results.items()}


def answers(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> dict[str, str]:
    """Returns the greedy continuation of each prompt, `NEW_TOKENS` tokens at most, by its text."""
    found = complete(model, tokenizer, prompts, Sampling(NEW_TOKENS, temperature=0))
    texts = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
    return {text: each.text.strip() for text, each in zip(texts, found, strict=True)}


def verdict(nats: float, before: dict[str, str], after: dict[str, str]) -> str:
    """Returns what `val/kept` means, and the answers of the base and of the tuned model."""
    words = "still answers as before"
    if nats > LOSES:
        words = "no longer answers as before: lower --learning_rate, or take fewer --epochs"
    elif nats > KEEPS:
        words = "answers in another form, and may have lost knowledge: compare its answers"
    lines = [f"beside what it was trained on, the model {words} (val/kept {nats:.2f})"]
    for prompt, text in before.items():
        lines += [prompt, f"  before: {text!r}", f"  after:  {after[prompt]!r}"]
    return "\n".join(lines)
