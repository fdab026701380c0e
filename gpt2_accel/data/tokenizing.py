"""Pieces of text -> pieces of tokens, by many processes.

Each piece becomes, below `pieces/` of the work folder, a file of token ids for each split and a record of
what is in them. The record comes last: a piece that has one is done.
"""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import BinaryIO

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from gpt2_accel.data.documents import Document, Piece
from gpt2_accel.data.plan import Plan
from gpt2_accel.data.shards import token_dtype
from gpt2_accel.data.sources import persistently
from gpt2_accel.files import atomic_file, write_file
from gpt2_accel.tokenizer import END_OF_TEXT, load_tokenizer, token_encoder

# What is counted of the documents, beside how many they are: those without any text, which are left out;
# those with bytes that are not UTF-8, which become U+FFFD; those that hold the literal <|endoftext|>, which
# is encoded as text; and the bytes of the longest.
COUNTS = ("empty", "not_utf8", "literal_separator", "longest")

Progress = Callable[[int, int, int], None]
"""Is told of further documents, tokens and bytes of text."""


def tokenize(plan: Plan, workers: int) -> None:
    """Makes the pieces that are not there yet."""
    todo = [i for i in range(len(plan.pieces)) if not record_path(plan.work, i).exists()]
    size = sum(plan.pieces[i].size for i in todo)
    if size:
        check_disk(plan, todo, size)
    with tqdm(
        total=size or None, unit="B", unit_scale=True, desc="tokenizing", disable=None
    ) as bar:
        if min(workers, len(todo)) <= 1:
            writer = PieceWriter(plan.work, plan.tokenizer)
            progress = Bar(bar).add
            for number in todo:
                write_piece(writer, number, plan.pieces[number], progress)
        else:
            tokenize_in_parallel(plan, todo, min(workers, len(todo)), Bar(bar))


class Bar:
    """The progress bar: bytes of text, and with them documents and tokens."""

    def __init__(self, bar: tqdm):
        self.bar, self.totals = bar, [0, 0, 0]

    def add(self, *done: int) -> None:
        """Further documents, tokens and bytes."""
        self.set([total + more for total, more in zip(self.totals, done, strict=True)])

    def set(self, totals: list[int]) -> None:
        """All documents, tokens and bytes so far."""
        self.bar.set_postfix_str(f"{totals[0]:,} documents, {totals[1]:,} tokens", refresh=False)
        self.bar.update(totals[2] - self.totals[2])
        self.totals = totals


def check_disk(plan: Plan, todo: list[int], size: int) -> None:
    """Says how much room the shards will take; raises `OSError` if there is less."""
    document = next(plan.pieces[todo[0]].documents(), None)
    text = next(iter(document.chunks), "") if document else ""
    sample = clean(text)[0]
    per_byte = len(token_encoder(plan.tokenizer)(sample)) / max(1, len(sample.encode()))
    tokens = round(size * (per_byte or 1))
    needed = tokens * plan.dtype.itemsize + min(tokens, plan.shard_tokens) * plan.dtype.itemsize
    free = shutil.disk_usage(plan.work).free
    print(
        f"about {size / 1e9:.2f} GB of text, {tokens:,} tokens, {needed / 1e9:.2f} GB of disk; "
        f"{free / 1e9:.0f} GB are free",
        file=sys.stderr,
    )
    if needed > free:
        raise OSError(
            f"{plan.work.parent} has {free / 1e9:.1f} GB free, the shards need about "
            f"{needed / 1e9:.1f}: make room, or choose another --data_dir"
        )


def tokenize_in_parallel(plan: Plan, todo: list[int], workers: int, bar: Bar) -> None:
    """Makes the pieces `todo` in `workers` processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpt2_accel.data.tokenizing"])
    totals = context.Array("q", [0, 0, 0, 0])  # documents, tokens, bytes; whether to stop
    with ProcessPoolExecutor(workers, context, start_worker, (plan.work, totals)) as pool:
        futures = [pool.submit(make_piece, i, plan.pieces[i]) for i in todo]
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
                bar.set(list(totals)[:3])
                for future in done:
                    if error := future.exception():
                        raise error  # as if it were of this process: without what the other one's calls were
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process was killed, perhaps for lack of memory: start again, with fewer --workers"
            ) from error
        finally:
            totals[3] = 1
            pool.shutdown(cancel_futures=True)


def write_piece(writer: "PieceWriter", number: int, piece: Piece, progress: Progress) -> None:
    """Makes one piece, again from its start where the network fails."""
    persistently(lambda: writer.write(number, piece.documents(), progress))


worker_writes: Callable[[int, Piece], None]  # in a worker process


def start_worker(work: Path, totals) -> None:
    """Readies this worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process says when to stop
    Thread(target=end_with_parent, daemon=True).start()

    def progress(*done: int) -> None:
        if totals[3]:  # the main process stops
            os._exit(1)
        with totals.get_lock():
            for i, more in enumerate(done):
                totals[i] += more

    global worker_writes
    writer = PieceWriter(work, load_tokenizer(work / "tokenizer"))
    worker_writes = functools.partial(write_piece, writer, progress=progress)


def end_with_parent() -> None:
    """Ends this process once the main one has ended, be it by a kill, of which nobody else would tell."""
    multiprocessing.parent_process().join()
    os._exit(1)


def make_piece(number: int, piece: Piece) -> None:
    """Makes one piece, in a worker process."""
    worker_writes(number, piece)


def record_path(work: Path, number: int) -> Path:
    """Where the record of a finished piece is."""
    return work / "pieces" / f"{number:06d}.json"


def tokens_path(work: Path, number: int, split: str) -> Path:
    """Where the tokens of a piece are."""
    return work / "pieces" / f"{number:06d}.{split}"


def clean(text: str) -> tuple[str, bool]:
    """The text with U+FFFD for what is not UTF-8, and whether there was such a thing."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        # A pair of surrogates is a character; one alone is none.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole, "\ufffd" in whole
    return text, False


class PieceWriter:
    """Tokenizes the documents of one piece after another into its files.

    They get their names when they are complete and on disk, the record last; the names they have on the
    way are of this process alone.
    """

    def __init__(self, work: Path, tokenizer: PreTrainedTokenizerBase):
        self.work = work
        self.encode, self.dtype = token_encoder(tokenizer), token_dtype(len(tokenizer))
        separator = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self.separator = [] if separator is None else [separator]

    def write(self, number: int, documents: Iterable[Document], progress: Progress) -> None:
        """Makes piece `number`; leaves nothing half-made if that fails."""
        splits: dict[str, Counter] = {}
        counts = Counter(dict.fromkeys(COUNTS, 0))
        first_odd = None
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for document in documents:
                split = document.split
                if split not in files:
                    path = tokens_path(self.work, number, split)
                    files[split] = stack.enter_context(atomic_file(path))
                    splits[split] = Counter(tokens=0, documents=0, bytes=0)
                for more in self.write_document(document, files[split], counts):
                    splits[split].update(more)
                    progress(more["documents"], more["tokens"], more["bytes"])
                if counts["not_utf8"] and first_odd is None:
                    first_odd = document.place
        record = {"splits": splits, "counts": counts, "first_not_utf8": first_odd}
        write_file(record_path(self.work, number), json.dumps(record))

    def write_document(
        self, document: Document, file: BinaryIO, counts: Counter
    ) -> Iterator[dict[str, int]]:
        """Appends a document's tokens; yields, chunk by chunk, what was added."""
        size, odd, literal = 0, False, False
        for i, chunk in enumerate(document.chunks):
            text, replaced = clean(chunk)
            separator = self.separator if document.begins and i == 0 else []
            try:
                tokens = self.encode(text)
            except ValueError as error:
                raise ValueError(f"{document.place}: {error}") from error
            file.write(np.array(separator, self.dtype).tobytes())
            file.write(tokens.astype(self.dtype, copy=False).tobytes())
            more = {
                "documents": int(document.begins and i == 0),
                "tokens": len(separator) + len(tokens),
                "bytes": len(text) if text.isascii() else len(text.encode()),
            }
            size += more["bytes"]
            odd |= replaced
            literal |= END_OF_TEXT in text
            yield more
        counts.update(empty=int(size == 0), not_utf8=int(odd), literal_separator=int(literal))
        counts["longest"] = max(counts["longest"], size)
