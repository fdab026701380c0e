"""The training order is a function of the seed and the position.

There is no shuffle buffer, no index in memory and no state to save: the window at a position is
computed. Each update reads the next positions over all ranks, so the order does not depend on the
number of ranks or the micro-batch size. In a mixture each data set has its own order; `locate`
computes the data set at each position.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from gpt2_accel.rounding import ceil_div

BLOCK = 64  # consecutive windows that stay close to each other in the order
GROUP = 1024 * BLOCK  # windows that are shuffled together: with fewer, losses drift by topic
PERIOD = 1024  # positions in which the data sets of a mixture are shuffled
ROUNDS = 6  # Feistel rounds; four suffice in theory (Luby and Rackoff, 1988)


def shuffled(
    positions: np.ndarray, size: int, seed: int, epoch: int | np.ndarray = 0
) -> np.ndarray:
    """Returns the sample at each position of an epoch's training order.

    positions: (n,) integers in [0, size), epoch: one for all or (n,) -> (n,) int64 in [0, size).
    Over all positions of an epoch the result is a permutation, keyed by `seed` and `epoch`, in O(1)
    memory.

    The shuffle has two levels, so that a slow disk reads longer runs: blocks of `BLOCK` consecutive
    windows are permuted, then the windows within each group of blocks.
    """
    blocks = ceil_div(size, BLOCK)
    slots = blocks * BLOCK  # more than `size` where the last block is short
    epochs = np.broadcast_to(epoch, np.shape(positions))

    def two_levels(x: np.ndarray, i: np.ndarray) -> np.ndarray:
        group = x // GROUP
        start = group * GROUP
        length = np.minimum(GROUP, slots - start)
        slot = start + permute(x - start, length, hash64(seed, epochs[i], 1, group))
        block = permute(slot // BLOCK, blocks, hash64(seed, epochs[i], 0))
        return block * BLOCK + slot % BLOCK

    return walk_below(size, two_levels, np.array(positions, np.int64))


def permute(x: np.ndarray, size: int | np.ndarray, key: np.ndarray) -> np.ndarray:
    """Applies a keyed permutation of [0, size) to each element of x, (n,) int64.

    `size` and `key` (uint64) broadcast against x. The permutation is a balanced Feistel network
    over the smallest even number of bits that holds `size`.
    """
    size = np.broadcast_to(size, x.shape)
    key = np.broadcast_to(key, x.shape)
    half = (np.ceil(np.log2(np.maximum(size, 2))).astype(np.int64) + 1) // 2

    def feistel(x: np.ndarray, i: np.ndarray) -> np.ndarray:
        mask = (1 << half[i]) - 1
        left = x >> half[i]
        right = x & mask
        for round in range(ROUNDS):
            mixed = hash64(key[i], round, right) >> 32
            new = left ^ (mixed.astype(np.int64) & mask)
            left = right
            right = new
        return left << half[i] | right

    return walk_below(size, feistel, x)


def walk_below(
    size: int | np.ndarray, step: Callable[[np.ndarray, np.ndarray], np.ndarray], x: np.ndarray
) -> np.ndarray:
    """Restricts a permutation of a larger range to [0, size), by cycle walking.

    Applies `step` again to each value outside the range (Black and Rogaway, 2002). `step` takes the
    values and their indices in x.
    """
    x = x.copy()
    size = np.broadcast_to(size, x.shape)
    todo = np.arange(len(x))
    while len(todo):
        x[todo] = step(x[todo], todo)
        todo = todo[x[todo] >= size[todo]]
    return x


def hash64(*values: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """Hashes integers or integer arrays, which broadcast, to uniform uint64 values.

    Uses the mixing step of splitmix64 (Steele, Lea and Flood, 2014).
    """
    x: np.ndarray = np.zeros(1, np.uint64)  # an array, since numpy warns of overflow in scalars
    for value in values:
        x = (x ^ np.asarray(value).astype(np.uint64)) + 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
    return x


def locate(
    positions: np.ndarray, weights: Sequence[float], seed: int, length: float = math.inf
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns a data set to each position of the training order, by `weights`, which sum to 1.

    positions: (n,), below `length` -> the numbers of the data sets, (n,), and the positions in
    their own orders, (n,). Data set i has n · weights[i] of the first n positions, to within two,
    if n is a multiple of `PERIOD` or `length`. The data sets are shuffled within a period.
    """
    sets = np.empty_like(positions)
    places = np.empty_like(positions)
    periods = positions // PERIOD
    for period in np.unique(periods).tolist():
        here = periods == period
        size = int(min(PERIOD, length - period * PERIOD))
        slots = permute(positions[here] % PERIOD, size, hash64(seed, 2, period))
        before = counts_before(period * PERIOD, weights)
        starts = counts_before(period * PERIOD + size, weights) - before  # first slots in it
        own = np.searchsorted(starts, slots, side="right") - 1
        sets[here] = own
        places[here] = np.diff(before)[own] + slots - starts[own]
    return sets, places


def counts_before(position: int, weights: Sequence[float]) -> np.ndarray:
    """Returns how many positions before this one the data sets have, cumulated, (sets + 1,)."""
    shares = np.cumsum(np.append(0.0, weights))
    shares[-1] = 1.0
    return np.floor(position / PERIOD * (PERIOD * shares)).astype(np.int64)


def locate_phases(
    positions: np.ndarray, phases: Sequence[tuple[int, Sequence[float]]], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Does what `locate` does, with weights that change: `phases` are first positions and weights.

    The first phase begins at 0. Periods begin anew with a phase, and the data sets go on where the
    phase before has left them.
    """
    sets = np.zeros_like(positions)
    places = positions.copy()
    if len(phases[0][1]) == 1:
        return sets, places
    done = np.zeros(len(phases[0][1]), np.int64)  # positions of each data set in earlier phases
    ends = [start for start, _ in phases[1:]] + [math.inf]
    for (start, weights), end in zip(phases, ends, strict=True):
        here = (start <= positions) & (positions < end)
        own, own_places = locate(positions[here] - start, weights, seed + start, end - start)
        sets[here] = own
        places[here] = own_places + done[own]
        if end < math.inf:
            done += np.diff(counts_before(int(end) - start, weights))
    return sets, places
