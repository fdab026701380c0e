"""Which tokens each update trains on, as a function of the seed and the step.

A sample is a window of `sequence_length` tokens and the one that follows. Its place in the training
order is computed, not remembered: no shuffle buffer, no index in memory, no state to save. Update
`step` reads positions [step·S, (step+1)·S) of the order, S being the sequences of one update over all
ranks, whatever the number of ranks and the micro-batch size.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from gpt2_accel.data.shards import TokenStream

Batch = tuple[torch.Tensor, torch.Tensor]

BLOCK = 64  # neighbouring windows that are read close to each other
GROUP = 1024 * BLOCK  # windows that are mixed with each other: with fewer, losses drift by topic
ROUNDS = 6  # of the Feistel network; four suffice in theory (Luby and Rackoff, 1988)


def shuffled(positions: np.ndarray, size: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Which sample stands at each position of the training order of one epoch.

    positions: (n,) integers in [0, size) -> (n,) int64 in [0, size). Over all positions it is a
    permutation, keyed by `seed` and `epoch`, in O(1) memory.

    It has two levels, so that a slow disk reads runs and not scattered windows: blocks of `BLOCK`
    neighbouring windows are permuted, then the windows within each group of blocks.
    """
    blocks = -(-size // BLOCK)
    slots = blocks * BLOCK  # more than `size` where the last block is short

    def two_levels(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        group = x // GROUP
        start = group * GROUP
        length = np.minimum(GROUP, slots - start)
        slot = start + permute(x - start, length, hash64(seed, epoch, 1, group))
        block = permute(slot // BLOCK, blocks, hash64(seed, epoch, 0))
        return block * BLOCK + slot % BLOCK

    return walk_below(size, two_levels, np.array(positions, np.int64))


def permute(x: np.ndarray, size: int | np.ndarray, key: np.ndarray) -> np.ndarray:
    """A keyed permutation of [0, size), element by element; `size` and `key` broadcast against x.

    A balanced Feistel network over the smallest even number of bits that holds `size`.
    """
    size = np.broadcast_to(np.asarray(size, np.int64), x.shape)
    key = np.broadcast_to(key, x.shape)
    half = (np.ceil(np.log2(np.maximum(size, 2))).astype(np.int64) + 1) // 2

    def feistel(x: np.ndarray, i: np.ndarray) -> np.ndarray:
        left, right = x >> half[i], x & ((1 << half[i]) - 1)
        for round in range(ROUNDS):
            mixed = hash64(key[i], round, right) >> np.uint64(32)
            left, right = right, left ^ (mixed.astype(np.int64) & ((1 << half[i]) - 1))
        return left << half[i] | right

    return walk_below(size, feistel, x)


def walk_below(
    size: int | np.ndarray, step: Callable[[np.ndarray, np.ndarray], np.ndarray], x: np.ndarray
) -> np.ndarray:
    """Restricts a permutation of a larger range to [0, size): what lands outside goes on from there
    (cycle walking; Black and Rogaway, 2002). `step` is given the values and their places in x."""
    x, size = x.copy(), np.broadcast_to(size, x.shape)
    todo = np.arange(len(x))
    while len(todo):
        x[todo] = step(x[todo], todo)
        todo = todo[x[todo] >= size[todo]]
    return x


def hash64(*values: int | np.ndarray) -> np.ndarray:
    """Mixes integers or arrays of them, which broadcast, to uniform uint64 values.

    The mixing step is that of splitmix64 (Steele, Lea and Flood, 2014).
    """
    x = np.zeros(1, np.uint64)  # an array: numpy warns of overflow in scalars only
    for value in values:
        x = (x ^ np.asarray(value).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x


def count_windows(stream: TokenStream, sequence_length: int) -> int:
    """How many windows of `sequence_length` inputs, each with its next token, a split holds.

    Raises `ValueError` if it does not hold even one.
    """
    windows = (stream.tokens - 1) // sequence_length
    if windows < 1:
        raise ValueError(
            f"{stream.data_dir}, split {stream.split!r}, holds {stream.tokens} tokens, too few for one "
            f"sequence of {sequence_length} and its next token: add text or lower sequence_length"
        )
    return windows


def read_windows(stream: TokenStream, indices: np.ndarray, sequence_length: int) -> Batch:
    """Windows by number -> `(input_ids, targets)`, each (len(indices), sequence_length) int64 on CPU."""
    rows = [stream.read(i * sequence_length, sequence_length + 1) for i in indices.tolist()]
    tokens = torch.from_numpy(np.stack(rows))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Moves a batch; to a GPU from pinned memory, without waiting for the copy."""
    if device.type == "cuda":
        return tuple(part.pin_memory().to(device, non_blocking=True) for part in batch)
    return tuple(part.to(device) for part in batch)


class TrainLoader:
    """The batches of one rank, by step.

    `micro_batch_size` and `sequences_per_update` count sequences: the former per rank and backward,
    the latter over all ranks and micro-batches of one update. `micro_batches` is how many of them a
    rank has in one update, `windows` the length of an epoch.

    Raises `ValueError` if the split is shorter than one sequence.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        sequence_length: int,
        micro_batch_size: int,
        sequences_per_update: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.micro_batches, rest = divmod(sequences_per_update, micro_batch_size * world_size)
        assert self.micro_batches and not rest, (sequences_per_update, micro_batch_size, world_size)
        self.stream, self.sequence_length = stream, sequence_length
        self.micro_batch_size, self.sequences_per_update = micro_batch_size, sequences_per_update
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.device = torch.device(device)
        self.windows = count_windows(stream, sequence_length)

    def update(self, step: int) -> Iterator[Batch]:
        """The micro-batches of update `step`: `(input_ids, targets)`, each (micro_batch_size,
        sequence_length) int64 on the loader's device."""
        for number in range(self.micro_batches):
            slot = number * self.world_size + self.rank
            first = step * self.sequences_per_update + slot * self.micro_batch_size
            indices = self.order(np.arange(first, first + self.micro_batch_size))
            yield to_device(read_windows(self.stream, indices, self.sequence_length), self.device)

    def samples(self, step: int) -> list[int]:
        """The numbers of the windows that update `step` trains on, over all ranks."""
        first = step * self.sequences_per_update
        return self.order(np.arange(first, first + self.sequences_per_update)).tolist()

    def order(self, positions: np.ndarray) -> np.ndarray:
        """The windows at the given positions of the endless training order, epoch after epoch."""
        epochs, positions = np.divmod(positions, self.windows)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = shuffled(positions[here], self.windows, self.seed, epoch)
        return indices


class EvalLoader:
    """The windows of a split in order, each on exactly one rank, as full batches of one shape.

    Iterating yields `(input_ids, targets)`, each (batch_size, sequence_length) int64 on `device`. The
    last batch is filled up with copies whose targets are -100, so that compiled code sees one shape.
    `windows` counts them over all ranks, `mine` are the numbers of this rank's, and `rounds` is the number
    of batches of the rank that has most.

    `max_tokens` bounds the windows over all ranks; at least one is read. Raises `ValueError` if the
    split is shorter than one sequence.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        sequence_length: int,
        batch_size: int,
        max_tokens: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.stream, self.sequence_length, self.batch_size = stream, sequence_length, batch_size
        windows = min(count_windows(stream, sequence_length), max(1, max_tokens // sequence_length))
        self.windows = windows
        self.mine = np.arange(rank, windows, world_size)
        self.rounds = -(-windows // (world_size * batch_size))
        self.device = torch.device(device)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.mine), self.batch_size):
            indices = self.mine[start : start + self.batch_size]
            filled = np.resize(indices, self.batch_size)
            input_ids, targets = read_windows(self.stream, filled, self.sequence_length)
            targets[len(indices) :] = -100
            yield to_device((input_ids, targets), self.device)
