"""Loss on a fixed set of windows of prepared data."""

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.data.loader import Batch, EvalLoader, open_split
from gpt2_accel.data.prefetch import prefetch
from gpt2_accel.data.shards import UnreadableData, check_pairs, check_tokenizer, read_manifest
from gpt2_accel.evals import Evaluation
from gpt2_accel.evals.formulas import mean_loss, token_loss
from gpt2_accel.evals.likelihood import batch_tokens
from gpt2_accel.hf.hub_data import open_hub
from gpt2_accel.models import ModelConfig, evaluating
from gpt2_accel.runtime.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Measure = Callable[[torch.nn.Module, Batch], dict[str, torch.Tensor]]
"""(prepared model, batch of B windows) -> figures of each window, (B,): `loss`, a sum, `counted`, of how many, and others."""


def token_losses(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the sum of the nats of each window's counted targets, and their number, (B,) each."""
    targets = batch.targets
    nats = model(batch.input_ids, targets, documents=batch.documents, reduction="none")
    return {"loss": nats.sum(dim=1), "counted": (targets != -100).sum(dim=1)}


@torch.no_grad()
def per_window(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: EvalLoader,
    measure: Measure,
    title: str,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, torch.Tensor] | None:
    """Returns the figures of all windows of `loader` by the prepared `model` in evaluation mode, each (windows,) fp32.

    All ranks call it, each with its own loader, and get the same. `interrupted` is called before each batch and must agree
    on all ranks; if True, returns None. Raises `UnreadableData` on all ranks if one could not read its windows.
    """
    found: list[torch.Tensor] = []  # (figures, batch_size) per batch
    figures: dict[str, torch.Tensor] = {}
    with evaluating(model), closing(prefetch(loader, accelerator.device)) as batches:
        rounds = zip(range(loader.rounds), batches, strict=False)
        for _, batch in progress(rounds, title, loader.rounds, shown=accelerator.is_main_process):
            if interrupted():
                return None
            figures = measure(model, batch)
            found.append(torch.stack([values.float() for values in figures.values()]))
    problems = gather_object([loader.problem and str(loader.problem)])
    if problem := next(filter(None, problems), None):
        raise UnreadableData(problem)
    totals = torch.zeros(len(figures), loader.windows, device=accelerator.device)
    mine = torch.from_numpy(loader.numbers).to(totals.device)
    totals[:, mine] = torch.cat(found, dim=1)[:, : len(mine)]  # the padding comes last
    # The host waits for the device only here. Each window belongs to one rank.
    return dict(zip(figures, accelerator.reduce(totals, "sum").cpu(), strict=True))


def validation_loss(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    loader: EvalLoader,
    prefix: str = "val",
    measure: Measure = token_losses,
) -> dict[str, float]:
    """Evaluates the prepared `model` on the windows of `loader`. The arguments and errors are those of `per_window`; the
    result is empty if it is interrupted.

    Returns, with the default `prefix`:
    - `val/loss`: the mean over all that counts, by default over tokens, in nats, and `val/loss_stderr`, its standard error
      over windows;
    - `val/perplexity`: its exponential;
    - `val/bits_per_byte`: the code length of the tokens, separators included, per byte of text; comparable across
      tokenizers. It is missing if the number of bytes is unknown.

    An own `measure` has the means of its other figures in place of the last two.
    """
    found = per_window(accelerator, model, loader, measure, f"evaluating {prefix}", interrupted)
    if found is None:
        return {}
    sums, counted = found.pop("loss").tolist(), found.pop("counted").tolist()
    if measure is token_losses:
        results = token_loss(sums, counted, sum(counted) * (loader.bytes_per_token or 0))
    else:
        means = {name: math.fsum(values.tolist()) / sum(counted) for name, values in found.items()}
        results = mean_loss(sums, counted) | means
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

    Raises `ValueError` if the data was made with another tokenizer than the model's, or holds pairs.
    """
    open_hub(data_dir)
    check_pairs(data_dir)
    check_tokenizer(data_dir, tokenizer, "the model")
    length = read_manifest(data_dir).get("sequence_length") or config.n_positions
    tokens = min(batch_tokens(config.vocab_size), max_tokens)
    loader = EvalLoader(
        open_split(data_dir, split),
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
