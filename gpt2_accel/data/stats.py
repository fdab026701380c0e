"""Statistics of a data folder as text."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np

from gpt2_accel.data.loader import open_split
from gpt2_accel.data.shards import (
    BLOCK,
    STARTS,
    TOKEN_ID,
    TokenStream,
    load_data_tokenizer,
    read_manifest,
)

SHOWN = 3  # documents per split
SHOWN_TOKENS = 40  # of each


def describe(data_dir: str | Path) -> str:
    """Describes each split: documents, tokens, bytes per token, a histogram of the lengths, and some beginnings.

    Reads all tokens, on all cores.
    """
    manifest = read_manifest(data_dir)
    tokenizer = load_data_tokenizer(data_dir)
    revision = f" at {manifest['revision']}" if manifest.get("revision") else ""
    lines = [
        f"{manifest['source']}{revision}; tokenizer {manifest['tokenizer'].get('name', '')} of "
        f"{manifest['tokenizer']['vocab_size']:,}"
    ]
    for split in manifest["splits"]:
        for stream, share in open_split(data_dir, split):
            separator = manifest["tokenizer"]["end_of_text"]
            if stream.sequence_length is not None:
                lines += ["", *describe_conversations(stream, share, tokenizer)]
                continue
            lines += ["", *describe_split(stream, share, separator)]
            if separator is not None:
                lines += shown_documents(stream, tokenizer, separator)
    return "\n".join(lines)


def describe_split(stream: TokenStream, share: float, separator: int | None) -> list[str]:
    """Returns the lines for one split: its counts, and the histogram if the data has separators."""
    part = f" ({share:.1%} of the mixture)" if share < 1 else ""
    per_token = f", {stream.bytes / stream.tokens:.2f} bytes per token" if stream.bytes else ""
    head = f"{stream.data_dir}, {stream.split}{part}: {stream.tokens:,} tokens{per_token}"
    if separator is None:
        return [head]
    starts = np.append(document_starts(stream, lambda block: block == separator), stream.tokens)
    lengths = np.diff(starts) - 1  # without the separator
    if not len(lengths):
        return [f"{head}, no separators"]
    head += f", {len(lengths):,} documents of {np.median(lengths):,.0f} tokens in the median"
    return [head, *histogram(lengths)]


def describe_conversations(stream: TokenStream, share: float, tokenizer) -> list[str]:
    """Returns the lines for one split of conversations: its counts, a histogram of the lengths, and some windows."""
    part = f" ({share:.1%} of the mixture)" if share < 1 else ""
    windows, length = len(stream.targets), stream.sequence_length
    starts = np.append(document_starts(stream, lambda block: block & STARTS != 0), stream.tokens)
    lengths = np.diff(starts)
    for window in range(windows):  # the last conversation of each has its padding
        tokens = stream.read(window * length, length)
        last = np.searchsorted(starts, (window + 1) * length) - 1
        lengths[last] -= int((tokens[::-1] != tokenizer.pad_token_id).argmax())
    lines = [
        f"{stream.data_dir}, {stream.split}{part}: {len(starts) - 1:,} conversations in {windows:,} windows of "
        f"{length:,} tokens, {stream.targets.sum() / lengths.sum():.0%} of what "
        "they hold counts in the loss",
        *histogram(lengths),
    ]
    for window in sorted({windows * i // SHOWN for i in range(SHOWN)}):
        ids = stream.read(window * length, length) & TOKEN_ID
        lines.append(f"  window {window:,}: {tokenizer.decode(ids[:SHOWN_TOKENS].tolist())!r}")
    return lines


def document_starts(
    stream: TokenStream, is_start: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Returns the positions of the tokens of a split for which `is_start` is true, (documents,) int64."""
    starts = [0, *np.cumsum([shard["tokens"] for shard in stream.shards]).tolist()]

    def in_shard(number: int) -> list[np.ndarray]:
        blocks = enumerate(stream.shard(number).blocks())
        return [starts[number] + i * BLOCK + np.flatnonzero(is_start(block)) for i, block in blocks]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(in_shard, range(len(stream.shards)))
        return np.concatenate([np.empty(0, np.int64), *chain.from_iterable(found)])


def histogram(lengths: np.ndarray) -> list[str]:
    """Returns one line with a bar per power of two of the lengths."""
    classes = np.frexp(np.maximum(lengths, 1))[1] - 1  # 2**k <= length < 2**(k + 1)
    counts = np.bincount(classes)
    first = int(np.flatnonzero(counts)[0])
    lines = []
    for k, count in enumerate(counts[first:].tolist(), start=first):
        bar = "█" * round(40 * count / counts.max())
        lines.append(f"  {2**k:>10,} to {2 ** (k + 1) - 1:>10,} tokens {count:>12,} {bar}")
    return lines


def shown_documents(stream: TokenStream, tokenizer, separator: int) -> list[str]:
    """Returns the beginnings of a few documents, spread over the split."""
    lines = []
    for i in range(SHOWN):
        start = stream.tokens * i // SHOWN
        tokens = stream.read(start, min(4096, stream.tokens - start))
        begins = np.flatnonzero(tokens == separator)
        if len(begins):
            document = tokens[begins[0] + 1 :][:SHOWN_TOKENS]
            ends = np.flatnonzero(document == separator)
            text = tokenizer.decode(document[: ends[0] if len(ends) else None].tolist())
            lines.append(f"  token {start + begins[0]:,}: {text!r}")
    return lines
