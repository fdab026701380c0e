"""Tokenizes the pieces of a corpus with several processes.

Writes for each piece, in `pieces/` of the work folder, one file of token ids per split and a record with their counts.
The record is written last: a piece with a record is finished.
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
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from gpt2_accel.data.documents import Document, Piece
from gpt2_accel.data.plan import Plan
from gpt2_accel.data.shards import token_dtype
from gpt2_accel.data.sources import with_retries
from gpt2_accel.files import atomic_file, readable_size, write_file
from gpt2_accel.progress import Progress
from gpt2_accel.tokenizer import END_OF_TEXT, token_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Counts of documents: without text (left out); with bytes that are not UTF-8 (replaced by U+FFFD); with the literal
# <|endoftext|> (encoded as text); and the bytes of the longest.
COUNTS = ("empty", "not_utf8", "literal_separator", "longest")

SAMPLE = 2**16  # characters that are tokenized for an estimate

Report = Callable[[int, int, int], None]
"""Called with the numbers of additional documents, tokens and bytes of text."""


def tokenize(plan: Plan, workers: int, writer: "PieceWriter | None" = None) -> None:
    """Tokenizes the pieces that have no record yet. `writer` may be another class with the methods of `PieceWriter`."""
    todo = [i for i in range(len(plan.pieces)) if not record_path(plan.work, i).exists()]
    size = sum(plan.pieces[i].size for i in todo)
    writer = writer or PieceWriter(plan.work, plan.tokenizer)
    if size:
        check_disk(plan, writer, todo, size)
    else:
        print(f"tokenizing the text of {plan.data_dir}", file=sys.stderr)
    with Progress("tokenizing", size or None, unit="B", unit_scale=True) as bar:
        if min(workers, len(todo)) <= 1:
            progress = Bar(bar).add
            for number in todo:
                write_piece(writer, number, plan.pieces[number], progress)
        else:
            tokenize_in_parallel(plan, writer, todo, min(workers, len(todo)), Bar(bar))


class Bar:
    """Counts documents, tokens and bytes of text, and shows the bytes as progress."""

    def __init__(self, bar: Progress):
        self.bar, self.totals = bar, [0, 0, 0]

    def add(self, *done: int) -> None:
        """Adds documents, tokens and bytes."""
        self.set([total + more for total, more in zip(self.totals, done, strict=True)])

    def set(self, totals: list[int]) -> None:
        """Sets the totals: documents, tokens and bytes."""
        note = f"{totals[0]:,} documents, {totals[1]:,} tokens"
        self.bar.advance(totals[2] - self.totals[2], note)
        self.totals = totals


def check_disk(plan: Plan, writer: "PieceWriter", todo: list[int], size: int) -> None:
    """Prints the disk space that the shards need, estimated; raises `OSError` if less is free."""
    document = next(plan.pieces[todo[0]].documents(), None)
    tokens = round(size * ((writer.tokens_per_byte(document) if document else 0) or 1))
    copied = tokens if writer.keeps_pieces else min(tokens, plan.shard_tokens)
    needed = (tokens + copied) * writer.dtype.itemsize
    free = shutil.disk_usage(plan.work).free
    print(
        f"about {readable_size(size)} of text, {tokens:,} tokens, {readable_size(needed)} of disk; "
        f"{readable_size(free)} are free",
        file=sys.stderr,
    )
    if needed > free:
        raise OSError(
            f"{plan.work.parent} has {readable_size(free)} free, the shards need about "
            f"{readable_size(needed)}: make room, or choose another --data_dir"
        )


def worker_context() -> BaseContext:
    """Starts the process from which the workers fork, unless it runs; returns its context. It imports this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


def tokenize_in_parallel(
    plan: Plan, writer: "PieceWriter", todo: list[int], workers: int, bar: Bar
) -> None:
    """Tokenizes the pieces `todo` with `workers` processes. Raises `OSError` if a process is killed."""
    context = worker_context()
    totals = context.Array("q", [0, 0, 0, 0])  # documents, tokens, bytes; whether to stop
    with ProcessPoolExecutor(workers, context, start_worker, (writer, totals)) as pool:
        futures = [pool.submit(make_piece, i, plan.pieces[i]) for i in todo]
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
                bar.set(list(totals)[:3])
                for future in done:
                    if error := future.exception():
                        raise error
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process was killed, perhaps for lack of memory: start again, with fewer --workers"
            ) from error
        finally:
            totals[3] = 1
            pool.shutdown(cancel_futures=True)


def write_piece(writer: "PieceWriter", number: int, piece: Piece, progress: Report) -> None:
    """Tokenizes one piece, and starts it again if the network fails."""
    with_retries(lambda: writer.write(number, piece.documents(), progress))


worker_writes: Callable[[int, Piece], None]  # set in a worker process


def start_worker(writer: "PieceWriter", totals) -> None:
    """Initializes this worker process; `totals` is shared with the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    Thread(target=end_with_parent, daemon=True).start()

    def progress(*done: int) -> None:
        if totals[3]:  # the main process stops
            os._exit(1)
        with totals.get_lock():
            for i, more in enumerate(done):
                totals[i] += more

    global worker_writes
    worker_writes = functools.partial(write_piece, writer, progress=progress)


def end_with_parent() -> None:
    """Ends this process when the main process has ended, also after a kill."""
    multiprocessing.parent_process().join()
    os._exit(1)


def make_piece(number: int, piece: Piece) -> None:
    """Tokenizes one piece in a worker process."""
    worker_writes(number, piece)


def record_path(work: Path, number: int) -> Path:
    """Returns the path of a finished piece's record."""
    return work / "pieces" / f"{number:06d}.json"


def tokens_path(work: Path, number: int, split: str) -> Path:
    """Returns the path of a piece's tokens of a split."""
    return work / "pieces" / f"{number:06d}.{split}"


def clean(text: str) -> tuple[str, bool]:
    """Replaces lone surrogates, which stand for invalid bytes, by U+FFFD; returns the text and whether it had any."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        # A pair of surrogates is one character.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole, "\ufffd" in whole
    return text, False


def add_counts(totals: dict[str, int], counts: dict[str, int]) -> None:
    """Adds `counts` of `COUNTS` to `totals`; `longest` is the maximum."""
    longest = max(totals["longest"], counts["longest"])
    totals.update({name: totals[name] + counts[name] for name in COUNTS}, longest=longest)


class PieceWriter:
    """Tokenizes the documents of pieces into their files.

    The files are written atomically, the record last. Temporary names belong to this process alone. `keeps_pieces` says
    whether they stay until all shards are written.
    """

    keeps_pieces = False

    def __init__(self, work: Path, tokenizer: "PreTrainedTokenizerBase"):
        self.work = work
        self.encode, self.dtype = token_encoder(tokenizer), token_dtype(len(tokenizer))
        separator = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self.separator = [] if separator is None else [separator]

    def write(self, number: int, documents: Iterable[Document], progress: Report) -> None:
        """Tokenizes piece `number`; leaves no partial files after an error.

        The record's `counts` are those of the documents that begin in the piece, `last` those of the last of them.
        `rest` are those of the document that the previous piece began.
        """
        splits: dict[str, Counter] = {}
        counts, last, rest = dict.fromkeys(COUNTS, 0), None, None
        first_not_utf8 = None
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for document in documents:
                split = document.split
                if split not in files:
                    path = tokens_path(self.work, number, split)
                    files[split] = stack.enter_context(atomic_file(path))
                    splits[split] = Counter(tokens=0, documents=0, bytes=0)
                found = dict.fromkeys(COUNTS, 0)
                for more in self.write_document(document, files[split], found):
                    splits[split].update(more)
                    progress(more["documents"], more["tokens"], more["bytes"])
                if found["not_utf8"] and first_not_utf8 is None:
                    first_not_utf8 = str(document.place)
                if document.begins:
                    last = found
                    add_counts(counts, found)
                else:
                    rest = found
        record = {"splits": splits, "counts": counts, "last": last, "rest": rest}
        record["first_not_utf8"] = first_not_utf8
        write_file(record_path(self.work, number), json.dumps(record))

    def tokens_per_byte(self, document: Document) -> float:
        """Returns the tokens per byte at the beginning of a document."""
        sample = clean(next(iter(document.chunks), "")[:SAMPLE])[0]
        return len(self.encode(sample)) / max(1, len(sample.encode()))

    def write_document(
        self, document: Document, file: BinaryIO, counts: dict[str, int]
    ) -> Iterator[dict[str, int]]:
        """Appends a document's tokens to `file` and sets its `counts`; yields the added documents, tokens and bytes of
        each chunk."""
        size, not_utf8, literal = 0, False, False
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
            not_utf8 |= replaced
            literal |= END_OF_TEXT in text
            yield more
        counts.update(zip(COUNTS, map(int, (size == 0, not_utf8, literal, size)), strict=True))
