"""Writes the shards and the manifest from the tokenized pieces, the last step of a preparation.

Several threads write one shard each. A piece's file is removed as soon as no other shard needs it, so that a large
corpus takes little more disk space than its shards.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np

from gpt2_accel.data.plan import Plan
from gpt2_accel.data.shards import (
    MANIFEST,
    MANIFEST_FORMAT,
    VERSION,
    ShardWriter,
    read_manifest,
)
from gpt2_accel.data.tokenizing import COUNTS, add_counts, record_path, tokens_path
from gpt2_accel.files import remove, sync, sync_tree, write_file, write_json
from gpt2_accel.progress import progress
from gpt2_accel.tokenizer import GPT2_FINGERPRINT, bytes_per_token, fingerprint

BLOCK = 2**22  # tokens copied at once


def concatenate(plan: Plan) -> dict:
    """Writes the pieces' tokens one after the other into shards; returns the manifest."""
    count = len(plan.pieces)
    records = [json.loads(record_path(plan.work, i).read_text()) for i in range(count)]
    check_splits(plan, records)
    return {
        **manifest_head(plan, plan.dtype, VERSION),
        "counts": total_counts(records),
        "first_not_utf8": next(filter(None, (r.get("first_not_utf8") for r in records)), None),
        "splits": write_shards(plan, records),
    }


def finish(plan: Plan, assemble: Callable[[Plan], dict] = concatenate) -> dict:
    """Writes the shards and the manifest, renames the work folder to `plan.data_dir`, and returns the manifest.

    Can be called again after a kill at any point: the manifest is written after all shards, and the remaining steps
    need no piece. `assemble` writes the shards and returns the manifest. Raises `ValueError` if
    a split would be empty.
    """
    if not (plan.work / MANIFEST).exists():
        write_json(plan.work / MANIFEST, assemble(plan))
    manifest = read_manifest(plan.work)
    for name in ("pieces", "plan.json", ".lock"):
        remove(plan.work / name)
    sync_tree(plan.work)
    plan.work.rename(plan.data_dir)
    sync(plan.data_dir.parent)
    return manifest


def manifest_head(plan: Plan, dtype: np.dtype, version: int) -> dict:
    """Returns the entries of a manifest that do not depend on the pieces."""
    tokenizer, mark = plan.tokenizer, fingerprint(plan.tokenizer)
    name = tokenizer.name_or_path or type(tokenizer).__name__
    return {
        "format": MANIFEST_FORMAT,
        "version": version,
        "tokenizer": {
            "name": "gpt2" if mark == GPT2_FINGERPRINT else name,
            "vocab_size": len(tokenizer),
            "fingerprint": mark,
            "end_of_text": plan.separator,
        },
        "dtype": dtype.name,
        "source": plan.source,
        "revision": plan.revision,
        "command": plan.command,
        "plan": plan.hash,
    }


def check_splits(plan: Plan, records: list[dict]) -> None:
    """Raises `ValueError` if a split would be empty, and removes the pieces, which no other plan can use."""
    tokens: Counter = Counter()
    for record in records:
        tokens.update({split: counts["tokens"] for split, counts in record["splits"].items()})
    if plan.validation_shard:
        tokens = Counter(val=tokens["train"], train=tokens["train"] - plan.shard_tokens)
    for split in plan.splits:
        if tokens[split] <= 0:
            remove(plan.work / "pieces")
            shorter = ", or lower --shard_tokens" if plan.validation_shard else ""
            raise ValueError(
                f"{plan.source} holds no text for the split {split!r}: add documents{shorter}"
            )


def total_counts(records: list[dict]) -> dict[str, int]:
    """Adds up the counts of all pieces; `longest` is the maximum. A document of several pieces counts once."""
    totals, last = dict.fromkeys(COUNTS, 0), dict.fromkeys(COUNTS, 0)
    for record in records:
        if rest := record.get("rest"):  # no record of release 0.2 has one
            size = last["longest"] + rest["longest"]
            new = {name: max(rest[name] - last[name], 0) for name in COUNTS}
            last = {name: max(rest[name], last[name]) for name in COUNTS} | {"longest": size}
            add_counts(totals, new | {"longest": size})
        add_counts(totals, record["counts"])
        last = record.get("last") or last
    return totals


def write_shards(plan: Plan, records: list[dict]) -> dict[str, dict]:
    """Writes the shards of all splits and removes the pieces' files; returns the manifest's entries of the splits."""
    jobs: list[tuple[str, str, list[tuple[Path, int, int]]]] = []  # split, file, parts
    for split in sorted({split for record in records for split in record["splits"]}):
        for number, parts in enumerate(layout(plan, records, split)):
            if plan.validation_shard and number == 0:
                jobs.append(("val", "val_000000.bin", parts))
            else:
                jobs.append((split, f"{split}_{number - plan.validation_shard:06d}.bin", parts))
    uses = Counter(path for _, _, parts in jobs for path, _, _ in parts)
    lock = Lock()
    table = bytes_per_token(plan.tokenizer) if plan.validation_shard else None

    def make(job: tuple[str, str, list[tuple[Path, int, int]]]) -> dict:
        _, name, parts = job
        entry = make_shard(plan, name, parts, table)
        with lock:
            uses.subtract(path for path, _, _ in parts)
            for path, _, _ in parts:
                if not uses[path]:
                    path.unlink(missing_ok=True)
        return entry

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        entries = list(progress(pool.map(make, jobs), "writing shards", len(jobs)))
    splits: dict[str, dict] = {}
    for (split, _, _), entry in zip(jobs, entries, strict=True):
        totals = splits.setdefault(split, {"tokens": 0, "documents": 0, "bytes": 0, "shards": []})
        totals["tokens"] += entry["tokens"]
        totals["documents"] += entry["documents"]
        totals["bytes"] += entry.pop("bytes")
        totals["shards"].append(entry)
    if not plan.validation_shard:  # the records are exact with any tokenizer
        for split, totals in splits.items():
            of_split = [r["splits"][split] for r in records if split in r["splits"]]
            for name in ("documents", "bytes"):
                totals[name] = sum(part[name] for part in of_split)
    return splits


def layout(plan: Plan, records: list[dict], split: str) -> list[list[tuple[Path, int, int]]]:
    """Returns the parts of the pieces' files that make up each shard of a split: path, first token, token count."""
    shards: list[list[tuple[Path, int, int]]] = []
    room = 0
    for number, record in enumerate(records):
        start, end = 0, record["splits"].get(split, {}).get("tokens", 0)
        while start < end:
            if not room:
                shards.append([])
                room = plan.shard_tokens
            count = min(room, end - start)
            shards[-1].append((tokens_path(plan.work, number, split), start, count))
            start += count
            room -= count
    return shards


def make_shard(
    plan: Plan, name: str, parts: list[tuple[Path, int, int]], table: np.ndarray | None
) -> dict:
    """Writes a shard, unless an earlier call wrote it; returns its entry in the manifest and its `bytes`.

    `table` holds the bytes of each token's text, (vocab_size,); without it `bytes` is 0.
    """
    note = plan.work / "pieces" / f"{name}.json"
    if note.exists():
        return json.loads(note.read_text())
    writer = ShardWriter(plan.work / f"{name}.tmp", plan.dtype)
    documents = size = 0
    for path, start, count in parts:
        with open(path, "rb") as file:
            file.seek(start * plan.dtype.itemsize)
            while count:
                tokens = np.fromfile(file, plan.dtype, min(count, BLOCK))
                assert len(tokens), path
                count -= len(tokens)
                writer.append(tokens)
                if table is not None:
                    size += int(table[tokens].sum())
                if plan.separator is not None:
                    documents += int(np.count_nonzero(tokens == plan.separator))
    entry = {**writer.close(), "file": name, "documents": documents, "bytes": size}
    sync(writer.path)
    writer.path.rename(plan.work / name)
    write_file(note, json.dumps(entry))
    return entry
