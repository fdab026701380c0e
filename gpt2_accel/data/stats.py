"""Statistics of a data folder as text."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gpt2_accel.data.loader import open_split
from gpt2_accel.data.shards import BLOCK, STARTS, TOKEN_ID, load_data_tokenizer, read_manifest
from gpt2_accel.data.stream import TokenStream

SHOWN = 3  # beginnings of documents per split
SHOWN_TOKENS = 40  # of each


def describe(data_dir: str | Path) -> str:
    """Describes each split: documents, tokens, bytes per token, a histogram of the lengths, and some beginnings.

    Reads all tokens, on all cores.
    """
    manifest, tokenizer = read_manifest(data_dir), load_data_tokenizer(data_dir)
    revision = f" at {manifest['revision']}" if manifest.get("revision") else ""
    lines = [
        f"{manifest['source']}{revision}; tokenizer {manifest['tokenizer'].get('name', '')} of "
        f"{manifest['tokenizer']['vocab_size']:,}"
    ]
    for split in manifest["splits"]:
        for stream, share in open_split(data_dir, split):
            part = f" ({share:.1%} of the mixture)" if share < 1 else ""
            line = f"{stream.data_dir}, {split}{part}: {stream.tokens:,} tokens"
            if stream.bytes:
                line += f", {stream.bytes / stream.tokens:.2f} bytes per token"
            separator, padding = manifest["tokenizer"]["end_of_text"], tokenizer.pad_token_id
            starts, lengths = documents(stream, separator, padding)
            if stream.targets is not None:
                line += (
                    f", {len(starts):,} conversations in {len(stream.targets):,} windows, "
                    f"{stream.targets.sum() / lengths.sum():.0%} of what they hold counts in the loss"
                )
            elif len(starts):
                line += (
                    f", {len(starts):,} documents of {np.median(lengths):,.0f} tokens in the median"
                )
            lines += ["", line, *histogram(lengths)]
            for i in sorted(
                {len(starts) * i // SHOWN for i in range(SHOWN)} if len(starts) else ()
            ):
                start = int(starts[i])
                ids = stream.read(start, min(int(lengths[i]), SHOWN_TOKENS)) & int(TOKEN_ID)
                lines.append(f"  token {start:,}: {tokenizer.decode(ids.tolist())!r}")
    return "\n".join(lines)


def documents(
    stream: TokenStream, separator: int | None, padding: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first token of each document of a split and the number of its tokens, both (documents,) int64.

    A document of text follows a `separator`; a conversation has a mark at its first token, and ends at `padding` or at the
    next one.
    """
    step = BLOCK // (stream.sequence_length or 1) * (stream.sequence_length or 1)  # whole windows

    def borders(start: int) -> np.ndarray:  # (borders, 2): the place, and whether a document begins
        tokens = stream.read(start, min(step, stream.tokens - start))
        if stream.sequence_length is None:
            begins = tokens == separator
            ends = np.zeros_like(begins)
        else:
            begins = tokens & int(STARTS) != 0
            ends = tokens == padding
        places = np.flatnonzero(begins | ends)
        return np.stack((start + places, begins[places]), axis=1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = np.concatenate(
            [*pool.map(borders, range(0, stream.tokens, step)), [[stream.tokens, 0]]]
        )
    begins = np.flatnonzero(found[:, 1])
    starts, ends = found[begins, 0], found[begins + 1, 0]
    starts = starts + (stream.sequence_length is None)  # after the separator
    return starts, ends - starts


def histogram(lengths: np.ndarray) -> list[str]:
    """Returns a line with a bar for each power of two of the lengths."""
    classes = np.frexp(np.maximum(lengths, 1))[1] - 1  # 2**k <= length < 2**(k + 1)
    counts = np.bincount(classes, minlength=1)
    lines = []
    for k in range(classes.min(initial=len(counts)), len(counts)):
        bar = "█" * round(40 * counts[k] / counts.max())
        lines.append(f"  {2**k:>10,} to {2 ** (k + 1) - 1:>10,} tokens {counts[k]:>12,} {bar}")
    return lines
