"""Loss on a fixed set of windows of prepared data."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.data.loader import EvalLoader, open_split
from gpt2_accel.data.prefetch import prefetch
from gpt2_accel.data.shards import UnreadableData, check_tokenizer, read_manifest
from gpt2_accel.evals import Evaluation
from gpt2_accel.evals.formulas import bits_per_byte, mean_loss, perplexity
from gpt2_accel.evals.likelihood import batch_tokens
from gpt2_accel.hf.hub_data import open_hub
from gpt2_accel.models import ModelConfig, evaluating
from gpt2_accel.runtime.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    loader: EvalLoader,
    prefix: str = "val",
) -> dict[str, float]:
    """Evaluates the prepared `model` on the windows of `loader`. All ranks call it, each with its own loader.

    `interrupted` is called before each batch and must agree on all ranks; if True, the result is empty.

    Returns, with the default `prefix`:
    - `val/loss`: the mean over tokens, in nats, and `val/loss_stderr`, its standard error over windows;
    - `val/perplexity`: its exponential;
    - `val/bits_per_byte`: the code length of the tokens, separators included, per byte of text; comparable across
      tokenizers. It is missing if the number of bytes is unknown.

    Raises `UnreadableData` on all ranks if one could not read its windows.
    """
    found: list[torch.Tensor] = []  # nats and tokens of each window, (2, batch_size) per batch
    with evaluating(model), closing(prefetch(loader, accelerator.device)) as batches:
        rounds = zip(range(loader.rounds), batches, strict=False)
        for _, (input_ids, targets, documents, _) in progress(
            rounds, f"evaluating {prefix}", loader.rounds, shown=accelerator.is_main_process
        ):
            if interrupted():
                return {}
            nats = model(input_ids, targets, documents=documents, reduction="none")
            nats = nats.sum(dim=1).float()
            found.append(torch.stack((nats, (targets != -100).sum(dim=1).to(nats.dtype))))
    problems = gather_object([loader.problem and str(loader.problem)])
    if problem := next(filter(None, problems), None):
        raise UnreadableData(problem)
    totals = torch.zeros(2, loader.windows, device=accelerator.device)
    mine = torch.from_numpy(loader.numbers).to(totals.device)
    totals[:, mine] = torch.cat(found, dim=1)[:, : len(mine)]  # the padding comes last
    # The host waits for the device only here. Each window belongs to one rank.
    nats, tokens = accelerator.reduce(totals, "sum").tolist()
    results = mean_loss(nats, tokens)
    results["perplexity"] = perplexity(results["loss"])
    if loader.bytes_per_token:
        results["bits_per_byte"] = bits_per_byte(nats, sum(tokens) * loader.bytes_per_token)
    return {f"{prefix}/{name}": value for name, value in results.items()}


def prepare_loss(
    accelerator: Accelerator,
    tokenizer: "PreTrainedTokenizerBase",
    config: ModelConfig,
    data_dir: str | Path,
    split: str,
    max_tokens: int,
) -> tuple[Evaluation, str]:
    """Returns `validation_loss` of a model of shape `config` on a split, at most `max_tokens` tokens, and a note on them.

    Raises `ValueError` if the data was made with another tokenizer than the model's.
    """
    remote = open_hub(str(data_dir))
    check_tokenizer(data_dir, tokenizer, "the model")
    length = read_manifest(data_dir).get("sequence_length") or config.n_positions
    tokens = min(batch_tokens(config.vocab_size), max_tokens)
    loader = EvalLoader(
        open_split(data_dir, split, remote),
        sequence_length=length,
        batch_size=max(1, tokens // length),
        max_tokens=max_tokens,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    note = (
        f"{split}: the first {loader.windows * length:,} of {sum(s.tokens for s in loader.streams):,} tokens of "
        f"{data_dir}, in windows of {length:,}"
    )
    return partial(validation_loss, loader=loader, prefix=split), note
