"""Divides a corpus into parts, which worker processes tokenize."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpt2_accel.data.data_sets import parquet_parts
from gpt2_accel.data.documents import ByHash, LastPart, Rule, fitting_share
from gpt2_accel.data.rows import Column, JsonArray, JsonLines, Rows, column_of, is_compressed
from gpt2_accel.data.sources import (
    ROW_SUFFIXES,
    Joined,
    Source,
    part_size,
    text_size,
    text_spans,
)

SAMPLED_ROWS = 2000  # whose lengths decide how rows are held out


def join(parts: Iterable[Source], part_bytes: int) -> list[Source]:
    """Joins consecutive sources of up to `part_bytes` together."""
    groups: list[list[Source]] = []
    room = 0
    for part in parts:
        if part.size > room or not groups:
            groups.append([])
            room = part_bytes
        groups[-1].append(part)
        room -= part.size
    return [group[0] if len(group) == 1 else Joined(tuple(group)) for group in groups]


def file_parts(files: dict[Path, str], column: str, shard_tokens: int) -> list[Source]:
    """Divides files (`text_files`) into the parts of a corpus: first plain text, then rows, each in the files' order.

    Raises `ValueError` if the first rows are not documents with a text in `column`.
    """
    part_bytes = part_size(sum(text_size(p, p.stat().st_size) for p in files), shard_tokens)
    texts = {p: name for p, name in files.items() if not p.name.endswith(ROW_SUFFIXES)}
    rows = row_parts([path for path in files if path not in texts], shard_tokens, column)
    rule = rule_for(rows, column)
    return join(
        [*text_spans(texts, part_bytes), *(Column(part, column, rule) for part in rows)], part_bytes
    )


def rule_for(parts: Iterable[Rows], column: str) -> Rule:
    """Returns `ByHash` if it holds out a fitting share of the text in the first `SAMPLED_ROWS` rows, else `LastPart`."""
    rows = (row for part in parts for row in part.rows())
    sizes = {"train": 0, "val": 0}
    for row in list(itertools.islice(rows, SAMPLED_ROWS)):  # an open Arrow reader ends no process
        for split, text in ByHash()(column_of(row.value, column, row.place), row.number):
            sizes[split] += len(text)
    return ByHash() if fitting_share(sizes["val"] / (sum(sizes.values()) or 1)) else LastPart()


def row_parts(files: Sequence[Path], shard_tokens: int, column: str = "") -> list[Rows]:
    """Divides .jsonl, .jsonl.gz, .jsonl.zst, .json (an array, or lines) and .parquet files into parts of rows, in order.

    A `column` of "" means whole rows. Raises `ValueError` for a Parquet file that is damaged or lacks the column.
    """
    parts: list[Rows] = []
    part_bytes = part_size(sum(text_size(p, p.stat().st_size) for p in files), shard_tokens)
    for is_parquet, group in itertools.groupby(files, lambda path: path.suffix == ".parquet"):
        if is_parquet:
            parts += parquet_parts([*map(str, group)], column, shard_tokens)
            continue
        for path in group:
            info = path.stat()
            if path.suffix == ".json" and begins_with_a_bracket(path):
                parts.append(JsonArray(str(path), info.st_mtime_ns, info.st_size))
                continue
            step = info.st_size if is_compressed(str(path)) else part_bytes
            for start in range(0, info.st_size, max(1, step)):
                end = min(start + step, info.st_size)
                parts.append(JsonLines(str(path), start, end, info.st_mtime_ns))
    return parts


def begins_with_a_bracket(path: Path) -> bool:
    """Whether a JSON file holds an array, and not an object per line."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        blocks = iter(lambda: file.read(4096), "")
        return next(filter(None, map(str.lstrip, blocks)), "").startswith("[")
