"""Loss on a fixed set of windows of prepared data."""

import lzma
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.data.documents import text_digest
from gpt2_accel.data.loader import Batch, EvalLoader
from gpt2_accel.data.prefetch import prefetch
from gpt2_accel.data.shards import UnreadableData
from gpt2_accel.data.source import Data
from gpt2_accel.evals.formulas import mean, token_loss
from gpt2_accel.evals.likelihood import batch_tokens
from gpt2_accel.models import ModelConfig, evaluating
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.tokenizer import LOSSY, PreTrainedTokenizerBase

XZ_TOKENS = 500_000  # compressed in a second
START = 200  # characters of the text for validation that its fingerprint has

Measure = Callable[[torch.nn.Module, Batch], dict[str, torch.Tensor]]
"""(prepared model, batch of B windows) -> figures of each window, (B,): `loss`, a sum; `counted`,
the number of its terms; and others."""


def token_losses(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the loss of each window, summed over its counted targets, in nats, and their number,
    (B,) each."""
    targets = batch.targets
    nats = model(batch.input_ids, targets, documents=batch.documents, reduction="none")
    return {"loss": nats.float().sum(dim=1), "counted": (targets != -100).sum(dim=1)}


@torch.no_grad()
def per_window(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: EvalLoader,
    measure: Measure,
    title: str,
    interrupted: Callable[[], bool],
) -> dict[str, torch.Tensor] | None:
    """Returns the figures of all windows of `loader`, (windows,) fp32 each, on the CPU.

    `model` is prepared and evaluated in evaluation mode. All ranks call it, each with its own
    loader, and get the same result. `interrupted` is called before each batch and must agree on
    all ranks; if True, returns None. Raises `UnreadableData` on all ranks if one of them could not
    read its windows.
    """
    found: list[torch.Tensor] = []  # (figures, batch_size) per batch
    figures: dict[str, torch.Tensor] = {}
    with evaluating(model), closing(prefetch(loader, accelerator.device)) as batches:
        rounds = zip(range(loader.rounds), batches, strict=False)
        for _, batch in Progress(
            title, loader.rounds, rounds, disable=not accelerator.is_main_process
        ):
            if interrupted():
                return None
            figures = measure(model, batch)
            found.append(torch.stack([values.float() for values in figures.values()]))
    for problem in gather_object([str(loader.problem or "")]):
        if problem:
            raise UnreadableData(problem)
    # (ranks, figures, windows of a rank). Window k · ranks + r is the k-th of rank r, so padding
    # windows come last. The host waits for the device only here.
    parts = accelerator.gather(torch.cat(found, dim=1)[None]).cpu()
    windows = parts.permute(1, 2, 0).flatten(1)[:, : loader.windows]
    return dict(zip(figures, windows, strict=True))


def validation_loss(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    loader: EvalLoader,
    prefix: str = "val",
    measure: Measure = token_losses,
) -> dict[str, float]:
    """Returns the loss of the prepared `model` on the windows of `loader`, or an empty result if
    interrupted. `per_window` describes the arguments. Raises `UnreadableData` on all ranks if
    one cannot read its windows.

    With the default `prefix` and `measure`:
    - `val/loss`: mean over counted targets, in nats, and `val/loss_stderr`, its standard error over
      windows;
    - `val/perplexity`: the exponential of the loss;
    - `val/bits_per_byte`: code length of the tokens, separators included, per byte of text, which
      is comparable across tokenizers; missing if the number of bytes is unknown.

    Another `measure` gives the loss and the means of its other figures.
    """
    figures = per_window(accelerator, model, loader, measure, f"evaluating {prefix}", interrupted)
    if figures is None:
        return {}
    sums = figures.pop("loss").tolist()
    counted = figures.pop("counted").tolist()
    if measure is token_losses:
        results = token_loss(sums, counted, sum(counted) * (loader.bytes_per_token or 0))
    else:
        results = mean(sums, counted)
        for name, values in figures.items():
            results[name] = math.fsum(values.tolist()) / sum(counted)
    return {f"{prefix}/{name}": value for name, value in results.items()}


def describe_validation(data: Data, max_tokens: int) -> dict[str, Any]:
    """Returns `validation`, a fingerprint of the text for validation (its bytes and its start),
    which is the same for each tokenizer unless only `max_tokens` are evaluated; and
    `xz_bits_per_byte`, what `xz -9` needs for it: not for conversations, or more than `XZ_TOKENS`.
    """
    streams = [stream for stream, _ in data.val or ()]
    tokens = sum(stream.tokens for stream in streams)
    sizes = [getattr(stream, "bytes", None) or stream.tokens for stream in streams]
    texts: list[str] = []
    if data.folder and not data.chat:
        for stream in streams:
            ids = stream.read(0, min(XZ_TOKENS, stream.tokens))
            texts.append(str(data.tokenizer.decode(ids, skip_special_tokens=True)))
    starts = [text[:START] for text in texts]
    key = f"{sizes} {tokens > max_tokens and max_tokens} {starts}"
    about: dict[str, Any] = {"validation": str(text_digest(key))}
    text = "".join(texts).encode()
    if text and tokens <= XZ_TOKENS:
        about["xz_bits_per_byte"] = 8 * len(lzma.compress(text, preset=9)) / len(text)
    return about


def prepare_loss(
    accelerator: Accelerator,
    tokenizer: "PreTrainedTokenizerBase",
    config: ModelConfig,
    data: Data,
    split: str,
    max_tokens: int,
    bos: Sequence[int] = (),
    length: int | None = None,
) -> tuple[Callable[..., dict[str, float]], str]:
    """Returns `validation_loss` on the first `max_tokens` tokens of a split of prepared data, and a
    note with their number. `bos` as in `Windows`. Windows of text have `length` tokens, by default
    the positions of the shape `config`.

    Raises `ValueError` if the data was prepared with another tokenizer, or contains pairs.
    """
    data.check_pairs()
    data.check_tokenizer(tokenizer, "the model")
    length = data.sequence_length or length or config.n_positions
    tokens = min(batch_tokens(config.vocab_size), max_tokens)
    loader = EvalLoader(
        data.split(split),
        sequence_length=length,
        batch_size=max(1, tokens // length),
        max_tokens=max_tokens,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        bos=bos,
    )
    streams = [stream for stream, _ in loader.parts]
    total = sum(stream.tokens for stream in streams)
    note = (
        f"{split}: the first {loader.windows * length:,} of {total:,} tokens of {data.name}, in "
        f"windows of {length:,}"
    )
    unknown = sum(stream.unknown for stream in streams)
    if unknown:
        note += f"; {LOSSY.format(unknown)}"
    return partial(validation_loss, loader=loader, prefix=split), note
