"""Shuffling: the order of rows, and rows held in memory to be drawn from.

Rows that fit into memory are drawn in any order. Of more than that, drawing each
from anywhere would read a page of the disk for every row. There, whole blocks of rows
that lie together are drawn at random until a window of them is full, and the rows
of a window are shuffled one by one (CorgiPile: Xu et al. 2022, "In-Database Machine
Learning with CorgiPile: Stochastic Gradient Descent without Full Data Shuffle",
section 4, algorithm 1). Which rows share a window is random, and new in every pass.

All of it is decided by the seed, the pass, the rank, and the number and bytes of its rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO

import numpy as np

from elephant.data.epoch_plan import generator, row_order
from elephant.data.ragged import Values, take_rows

# Rows of so many bytes are shuffled as a whole, through a mapping of their files: about what TensorFlow takes itself.
WHOLE_BYTES = 640 << 20
# A disk reads so much at a time at nearly its full rate.
BLOCK_BYTES = 256 << 10
# A window is this part of all rows, within these limits.
WINDOW_PART = 16
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES = 32 << 20, 128 << 20
# What it takes to order a row: narrow rows count for more than they hold.
_LEAST_ROW_BYTES = 64
# Sequences of like length are looked for among those of so many batches.
POOL_BATCHES = 100
_BLOCKS, _WINDOW, _POOL = 4, 5, 6


@dataclass(frozen=True)
class RowRanges:
    """Positions of rows as stretches of rows that follow one another.

    Args:
        firsts: The first row of each, in ascending order.
        counts: The rows of each.

    >>> RowRanges.of(np.array([2, 3, 4, 9])).ends()
    [(2, 5), (9, 10)]
    """

    firsts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> RowRanges:
        """Returns the stretches of sorted positions."""
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        starts = np.concatenate([[0], breaks]) if len(rows) else np.empty(0, np.int64)
        return cls(rows[starts], np.diff(np.append(starts, len(rows))))

    def times(self, items: int) -> RowRanges:
        """Returns the stretches of items, of which each row has so many."""
        return RowRanges(self.firsts * items, self.counts * items)

    def ends(self) -> list[tuple[int, int]]:
        """Returns the first position of each stretch, and the one after its last."""
        return list(zip(self.firsts.tolist(), (self.firsts + self.counts).tolist(), strict=True))

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Returns the places of rows when all stretches are laid end to end."""
        stretch = np.searchsorted(self.firsts, rows, side="right") - 1
        before = np.cumsum(self.counts) - self.counts
        return rows - self.firsts[stretch] + before[stretch]


class ShuffleBuffer:
    """Rows in memory, found by their positions in the shard that they were read from."""

    def __init__(self, ranges: RowRanges, columns: Sequence[Values], items: Sequence[int]) -> None:
        self.columns = columns
        self._ranges = ranges
        self._items = items

    def take(self, rows: np.ndarray) -> tuple[Values, ...]:
        """Returns copies of the rows at the given positions of the shard, in that order."""
        places = self._ranges.places(rows)
        return tuple(take_rows(column, places, items) for column, items in zip(self.columns, self._items, strict=True))


def read_pieces(file: FileIO, pieces: Sequence[tuple[int, int]], item_bytes: int, into: np.ndarray) -> None:
    """Reads pieces of a file, one after the other, to the beginning of an array.

    Raises:
        OSError: The file ends before.
    """
    room = into.reshape(-1).view(np.uint8).data
    for first, last in pieces:
        wanted, at = (last - first) * item_bytes, first * item_bytes
        while wanted:
            count = os.preadv(file.fileno(), [room[:wanted]], at)
            if not count:
                raise OSError(f"expected {wanted} more bytes from byte {at} on. Received: the end of the file.")
            room, wanted, at = room[count:], wanted - count, at + count


@dataclass(frozen=True)
class Blocks:
    """Division of rows for shuffling.

    Args:
        rows: Of a block; the last one may have fewer.
        window: Blocks of a window; the last one may have fewer.
    """

    rows: int
    window: int


def are_few(num_bytes: int) -> bool:
    """Returns whether rows of so many bytes are taken from anywhere in their files; others are read in order."""
    return num_bytes <= WHOLE_BYTES


def blocks_of(num_rows: int, num_bytes: int) -> Blocks:
    """Divides rows for shuffling: those that can be shuffled as a whole are one block, and one window.

    >>> blocks_of(60_000, 60_000 * 3136)
    Blocks(rows=60000, window=1)
    >>> blocks_of(2_000_000, 2_000_000 * 3136)
    Blocks(rows=83, window=515)
    """
    if are_few(num_bytes) or num_rows == 0:
        return Blocks(max(num_rows, 1), 1)
    row_bytes = max(num_bytes // num_rows, _LEAST_ROW_BYTES)
    rows = max(BLOCK_BYTES // row_bytes, 1)
    window_bytes = min(max(num_bytes // WINDOW_PART, LEAST_WINDOW_BYTES), MOST_WINDOW_BYTES)
    return Blocks(rows, max(window_bytes // (rows * row_bytes), 1))


class PassOrder:
    """The places of a rank's training rows in the order in which one pass uses them, made a window at a time.

    Args:
        epoch: The pass, from zero.
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        rank: int,
        num_rows: int,
        blocks: Blocks,
        *,
        shuffle: bool,
        entered: Callable[[int, np.ndarray], object] | None = None,
    ) -> None:
        self._key = (seed, epoch, rank)
        self._num_rows = num_rows
        self._blocks = blocks
        self._shuffle = shuffle
        self._entered = entered
        count = -(-num_rows // blocks.rows)
        self._order = generator(_BLOCKS, *self._key).permutation(count) if shuffle else np.arange(count)
        sizes = np.minimum((self._order + 1) * blocks.rows, num_rows) - self._order * blocks.rows
        self._ends = np.cumsum([sizes[first : first + blocks.window].sum() for first in range(0, count, blocks.window)])
        self._current = (-1, np.empty(0, np.int64))

    def parts(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the rows that the pass uses from its ``start``-th up to, but without, its ``stop``-th, by window."""
        while start < stop:
            window = int(np.searchsorted(self._ends, start, side="right"))
            end = min(stop, int(self._ends[window]))
            first = int(self._ends[window - 1]) if window else 0
            yield self._window(window)[start - first : end - first]
            start = end

    def blocks_of_window(self, window: int) -> list[tuple[int, int]]:
        """Returns begin and end of each of a window's blocks; nothing after the last window."""
        size = self._blocks.rows
        chosen = self._order[window * self._blocks.window : (window + 1) * self._blocks.window]
        return [(int(block) * size, min(int(block + 1) * size, self._num_rows)) for block in chosen]

    def _window(self, window: int) -> np.ndarray:
        if self._current[0] != window:
            self._current = (window, self._made(window))
            if self._entered is not None:
                self._entered(*self._current)
        return self._current[1]

    def _made(self, window: int) -> np.ndarray:
        if len(self._order) == 1:
            return row_order(*self._key, self._num_rows, shuffle=self._shuffle)
        rows = np.concatenate([np.arange(*block) for block in self.blocks_of_window(window)])
        return generator(_WINDOW, *self._key, window).permutation(rows) if self._shuffle else rows


def order_by_length(lengths: np.ndarray, batch_size: int, key: tuple[int, int, int, int] | None) -> np.ndarray:
    """Returns an order of rows in batches of like length, so that little of a padded batch is padding.

    The rows of many batches are sorted by length and cut into batches, and these are drawn in a random
    order (bucketing in pools: Khomenko et al. 2016, "Accelerating recurrent neural network training
    using sequence bucketing and multi-GPU data parallelization", section III; Morishita et al. 2017,
    "An Empirical Study of Mini-Batch Creation Strategies for Neural Machine Translation").

    Args:
        key: Seed, pass, rank and pool; None keeps batches from the shortest to the longest.
    """
    batches = np.argsort(lengths, kind="stable").reshape(-1, batch_size)
    return (batches if key is None else generator(_POOL, *key).permutation(batches)).reshape(-1)


def left_over(places: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Returns the positions of rows by their places among those that are left when some are taken out.

    Args:
        places: From zero.

    >>> left_over(np.arange(4), np.array([0, 3]))
    array([1, 2, 4, 5])
    """
    return places + np.searchsorted(taken - np.arange(len(taken)), places, side="right")
