"""Some of a shard's rows, copied into memory to be drawn in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO

import numpy as np

from elephant.data.values import Values, take_rows


@dataclass(frozen=True)
class Stretches:
    """Positions of rows as stretches of rows that follow one another.

    Args:
        firsts: The first row of each, in ascending order.
        counts: The rows of each.

    >>> Stretches.of(np.array([2, 3, 4, 9])).ends()
    [(2, 5), (9, 10)]
    """

    firsts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> Stretches:
        """Returns the stretches of sorted positions."""
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        starts = np.concatenate([[0], breaks]) if len(rows) else np.empty(0, np.int64)
        return cls(rows[starts], np.diff(np.append(starts, len(rows))))

    def times(self, items: int) -> Stretches:
        """Returns the stretches of items, of which each row has so many."""
        return Stretches(self.firsts * items, self.counts * items)

    def ends(self) -> list[tuple[int, int]]:
        """Returns the first position of each stretch, and the one after its last."""
        return list(zip(self.firsts.tolist(), (self.firsts + self.counts).tolist(), strict=True))

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Returns where rows are when all stretches are laid end to end."""
        stretch = np.searchsorted(self.firsts, rows, side="right") - 1
        before = np.cumsum(self.counts) - self.counts
        return rows - self.firsts[stretch] + before[stretch]


class HeldRows:
    """Rows in memory, found by their positions in the shard that they were read from.

    Args:
        stretches: Which rows these are.
        columns: Their values, one per column of a batch; there may be unused memory behind them.
        items: Items of each column that make a row.
    """

    def __init__(self, stretches: Stretches, columns: Sequence[Values], items: Sequence[int]) -> None:
        self.columns = columns
        self._stretches = stretches
        self._items = items

    def take(self, rows: np.ndarray) -> tuple[Values, ...]:
        """Returns copies of the rows at the given positions of the shard, in that order."""
        places = self._stretches.places(rows)
        return tuple(take_rows(column, places, items) for column, items in zip(self.columns, self._items, strict=True))


def read_pieces(file: FileIO, pieces: Sequence[tuple[int, int]], item_bytes: int, into: np.ndarray) -> None:
    """Reads pieces of a file, one after the other, to the beginning of an array.

    Args:
        file: Holds items of one size.
        pieces: The first item of each, and the one after its last.
        item_bytes: Bytes of an item.
        into: What has room for them.

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
