"""Data loaders: the batches of a rank, in the order of `order.py` or for validation.

A sample is a window of a source (`source.py`). Prepared data is read by `Windows`.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from gpt2_accel.batch_size import halved
from gpt2_accel.data.order import locate_phases, shuffled
from gpt2_accel.data.shards import COUNTS, STARTS, TOKEN_ID, TokenStream, UnreadableData
from gpt2_accel.rounding import ceil_div
from gpt2_accel.runtime.files import sentence


class Batch(NamedTuple):
    """A batch of B windows of T tokens.

    input_ids, targets: (B, T) int64; targets that do not count are -100.
    documents: (B, T) int64, the number of each token's conversation in its row; None for text.
    divisor: a rank divides the mean loss of a micro-batch by it. The mean over the ranks of their
        sums is then the mean over all counted targets, or all pairs, of the update. Infinite if
        none counts.
    numbers: (B,) int64, the windows' numbers in their data set.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None
    divisor: float = 1
    numbers: torch.Tensor | None = None


ORDERED_AT_ONCE = 8192  # positions whose samples are computed together


class Windows:
    """The windows of a split of prepared data, a source.

    A window of text has `sequence_length` tokens and the token after it; a window of conversations
    holds all of its targets. `bos`, at most one token, replaces the first input of each window of
    text: a model whose tokenizer begins texts with BOS expects it there. The targets stay the same.

    Raises `ValueError` if there is no window, or if the windows of conversations have another
    length.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, bos: Sequence[int] = ()):
        self.stream = stream
        self.sequence_length = sequence_length
        self.bos = bos
        self.documents = stream.sequence_length is not None
        self.windows = (stream.tokens - (not self.documents)) // sequence_length
        if stream.sequence_length not in (None, sequence_length):
            raise ValueError(
                f"{stream.data_dir} holds conversations in windows of {stream.sequence_length} "
                f"tokens, not {sequence_length}: give --sequence_length {stream.sequence_length}, "
                "or prepare them again"
            )
        if self.windows < 1:
            raise ValueError(
                f"{stream.data_dir}, split {stream.split!r}, holds {stream.tokens} tokens, too few "
                f"for one sequence of {sequence_length} and its next token: add text, or lower "
                "--n_positions or --sequence_length"
            )

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, window: int) -> np.ndarray:
        """Returns inputs, targets and documents of a window, (3, sequence_length) int64.

        The documents of text are 0.
        """
        start = window * self.sequence_length
        if not self.documents:
            tokens = self.stream.read(start, self.sequence_length + 1)
            tokens[: len(self.bos)] = self.bos
            return np.stack((tokens[:-1], tokens[1:], np.zeros_like(tokens[1:])))
        tokens = self.stream.read(start, self.sequence_length)
        ids = tokens & TOKEN_ID
        counted = np.where(tokens & COUNTS, ids, -100)
        return np.stack((ids, np.append(counted[1:], -100), (tokens & STARTS != 0).cumsum()))

    def counts(self, window: int) -> int:
        """Returns the number of targets of a window that count, or 1 for a pair of answers."""
        targets = self.stream.targets
        return self.sequence_length if targets is None else int(targets[window])


@dataclass(eq=False)
class Loader:
    """Reads the batches of rank `rank` of `world_size`; base of the two loaders.

    `parts` are `Data.train` or `Data.val`: data sets with their weights. Those of text are read
    in windows of `sequence_length` tokens with `bos`, as in `Windows`. `documents`: batches have
    documents.

    `problem` is the first error of a read. After it nothing more is read, all tokens are 0, and
    `end` raises it after the last batch: until then all ranks run the same collectives.
    """

    parts: Sequence[tuple[Any, float]]
    _: KW_ONLY
    sequence_length: int
    rank: int = 0
    world_size: int = 1
    bos: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.sources = []
        for source, _ in self.parts:
            if isinstance(source, TokenStream):
                source = Windows(source, self.sequence_length, self.bos)
            self.sources.append(source)
        self.documents = any(source.documents for source in self.sources)
        self.problem: UnreadableData | None = None

    def read(self, samples: np.ndarray) -> Batch:
        """Reads samples, (n, 2): numbers of data sets and windows.

        Returns a batch of (n, sequence_length) on the CPU.
        """
        windows = np.zeros((3, len(samples), self.sequence_length), np.int64)
        try:
            if self.problem is None:
                for row, (number, window) in enumerate(samples.tolist()):
                    windows[:, row] = self.sources[number][window]
        except (OSError, ValueError) as error:
            self.problem = UnreadableData(sentence(error))
        input_ids, targets, documents = torch.from_numpy(windows)
        numbers = torch.from_numpy(samples[:, 1])
        return Batch(input_ids, targets, documents if self.documents else None, numbers=numbers)

    def end(self) -> None:
        """Raises the `problem`, if there is one."""
        if self.problem is not None:
            raise self.problem


@dataclass(eq=False)
class TrainLoader(Loader):
    """The training batches of one rank.

    `micro_batch_size` is the number of sequences per rank and backward pass, `windows` the number
    of sequences in the data. `phases` are later weights of a mixture and the positions from which
    on they hold. Raises `ValueError` if the split is shorter than one sequence.
    """

    _: KW_ONLY
    micro_batch_size: int
    seed: int
    phases: Sequence[tuple[int, Sequence[float]]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.windows = sum(source.windows for source in self.sources)
        self.ordered = functools.lru_cache(maxsize=4)(self.order_block)

    def micro_batches(self, sequences: int) -> int:
        """Returns the number of micro-batches of one rank in an update of `sequences` sequences.

        Their size is `micro_batch_size`, halved until it divides the rank's part, which may be
        smaller in a batch-size ramp.
        """
        sequences_per_rank = sequences // self.world_size
        return sequences_per_rank // halved(self.micro_batch_size, sequences_per_rank)

    def update(self, first: int, sequences: int) -> Iterator[Batch]:
        """Yields this rank's micro-batches of an update of `sequences` sequences over all ranks.

        The update starts at position `first` of the order. A micro-batch is (micro-batch size,
        sequence_length) on the CPU. Its divisor is the number of micro-batches if all tokens count.
        Raises `UnreadableData` at the end if a window could not be read.
        """
        size = sequences // self.world_size // self.micro_batches(sequences)
        samples = self.samples(first, sequences)
        counted = np.array([self.sources[n].counts(window) for n, window in samples.tolist()])
        for begin in range(self.rank * size, sequences, self.world_size * size):
            mine = slice(begin, begin + size)
            batch = self.read(samples[mine])
            own = self.world_size * int(counted[mine].sum())
            if not own:
                batch.targets[0, 0] = 0  # it has no weight; the mean of no target would be NaN
            yield batch._replace(divisor=int(counted.sum()) / own if own else math.inf)
        self.end()

    def samples(self, first: int, count: int) -> np.ndarray:
        """Returns the samples at `count` positions of the endless training order, from `first` on.

        (count, 2): numbers of the data set and the window. Each data set has its own epochs.
        """
        block, start = divmod(first, ORDERED_AT_ONCE)
        blocks = range(block, 1 + (first + count - 1) // ORDERED_AT_ONCE)
        return np.concatenate(list(map(self.ordered, blocks)))[start : start + count]

    def order_block(self, block: int) -> np.ndarray:
        """Returns the samples of a block of `ORDERED_AT_ONCE` positions, (positions, 2).

        One position at a time would be slow.
        """
        positions = np.arange(block * ORDERED_AT_ONCE, (block + 1) * ORDERED_AT_ONCE)
        phases = [(0, [weight for _, weight in self.parts]), *self.phases]
        sets, places = locate_phases(positions, phases, self.seed)
        windows = np.empty_like(places)
        for number in np.unique(sets).tolist():
            here = sets == number
            size = self.sources[number].windows
            epochs, places_in = np.divmod(places[here], size)
            windows[here] = shuffled(places_in, size, self.seed + number, epochs)
        return np.stack((sets, windows), axis=1)


@dataclass(eq=False)
class EvalLoader(Loader):
    """The windows of a split in order, each on exactly one rank, in batches of one shape.

    Iterating yields `rounds` batches on every rank, since a sharded model runs on all ranks at
    once. A batch is (batch_size, sequence_length) on the CPU. Padding windows have targets of -100.
    `windows` is the number of windows over all ranks, `numbers` are the windows of this rank.

    `max_tokens` limits the tokens over all ranks; they are divided by the weights of a mixture,
    with at least one window of each data set. `bytes_per_token` is the mean over the windows' text,
    None if unknown.

    Raises `ValueError` if a split is shorter than one sequence.
    """

    _: KW_ONLY
    batch_size: int
    max_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        samples = []
        counts = []
        for i, (source, (_, weight)) in enumerate(zip(self.sources, self.parts, strict=True)):
            most = int(self.max_tokens * weight) // self.sequence_length
            counts.append(min(source.windows, max(1, most)))
            samples += [(i, window) for window in range(counts[i])]
        self.windows = len(samples)
        self.numbers = np.arange(self.rank, self.windows, self.world_size)
        self.mine = np.array(samples)[self.numbers]
        self.rounds = ceil_div(self.windows, self.world_size * self.batch_size)
        self.bytes_per_token = None
        if all(getattr(source, "bytes", None) for source, _ in self.parts):
            ratios = [stream.bytes / stream.tokens for stream, _ in self.parts]
            self.bytes_per_token = float(np.average(ratios, weights=counts))

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.rounds):
            samples = self.mine[number * self.batch_size : (number + 1) * self.batch_size]
            batch = self.read(np.resize(samples, (self.batch_size, 2)))
            batch.targets[len(samples) :] = -100
            yield batch
        self.end()
