"""The rows of a column in memory: an array where all take the same space, buffers with offsets where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RaggedArray:
    """Items of their own length each, one after the other.

    Args:
        offsets: int64, one more than there are items: item i is from ``offsets[i]`` to ``offsets[i + 1]``.
        buffers: Arrays of equal length, which are cut at the offsets alike: the elements of a
            ragged column, the indices and the values of a sparse one, the bytes of a text.
    """

    offsets: np.ndarray
    buffers: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, items: np.ndarray) -> RaggedArray:
        """Returns copies of the items at the given positions, in that order.

        >>> words = RaggedArray(np.array([0, 2, 2, 5]), (np.arange(5),))
        >>> taken = words.take(np.array([2, 1, 0]))
        >>> taken.offsets.tolist(), taken.buffers[0].tolist()
        ([0, 3, 3, 5], [2, 3, 4, 0, 1])
        """
        starts = self.offsets[items]
        offsets = np.concatenate([[0], np.cumsum(self.offsets[items + 1] - starts)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], np.diff(offsets))
        return RaggedArray(offsets, tuple(np.take(buffer, places, axis=0) for buffer in self.buffers))


Values = np.ndarray | RaggedArray


def take_rows(values: Values, rows: np.ndarray, items: int = 1) -> Values:
    """Returns copies of a column's rows at the given positions, in that order.

    Args:
        items: Items of a `RaggedArray` that make a row.
    """
    if not isinstance(values, RaggedArray):
        return np.take(values, rows, axis=0, mode="clip")
    return values.take(rows if items == 1 else (rows[:, np.newaxis] * items + np.arange(items)).ravel())


def joined(parts: Sequence[Values]) -> Values:
    """Returns the rows of several parts of one column, one part after the other.

    >>> joined([RaggedArray(np.array([0, 2]), (np.arange(2),)), RaggedArray(np.array([0, 1]), (np.arange(1),))]).offsets
    array([0, 2, 3])
    """
    arrays = [part for part in parts if not isinstance(part, RaggedArray)]
    if arrays:
        return np.concatenate(arrays)
    variable = [part for part in parts if isinstance(part, RaggedArray)]
    lengths = np.concatenate([np.diff(part.offsets) for part in variable])
    buffers = zip(*[part.buffers for part in variable], strict=True)
    return RaggedArray(np.concatenate([[0], np.cumsum(lengths)]), tuple(np.concatenate(pieces) for pieces in buffers))


def padded(ragged: RaggedArray, length: int | None = None) -> np.ndarray:
    """Returns a ragged column's rows with zeros behind the short ones.

    Args:
        length: Elements per row; None takes the longest row's.

    >>> padded(RaggedArray(np.array([0, 2, 3]), (np.array([5, 6, 7]),)))
    array([[5, 6],
           [7, 0]])
    """
    lengths = np.diff(ragged.offsets)
    elements = ragged.buffers[0]
    longest = int(lengths.max(initial=0)) if length is None else length
    rows = np.zeros((len(ragged), longest, *elements.shape[1:]), elements.dtype)
    rows[np.arange(longest) < lengths[:, np.newaxis]] = elements
    return rows


def dense(ragged: RaggedArray, size: int) -> np.ndarray:
    """Returns a sparse column's rows as a matrix (rows, size)."""
    indices, values = ragged.buffers
    rows = np.zeros((len(ragged), size), values.dtype)
    rows[coordinates(ragged)[:, 0], indices] = values
    return rows


def coordinates(ragged: RaggedArray) -> np.ndarray:
    """Returns the place of every kept element of a sparse column, int64 (elements, 2)."""
    rows = np.repeat(np.arange(len(ragged)), np.diff(ragged.offsets))
    return np.stack([rows, ragged.buffers[0].astype(np.int64)], axis=1)


def strings(text: RaggedArray, row_shape: Sequence[int]) -> np.ndarray:
    """Returns a text column's rows as an array of ``bytes`` objects (rows, ...)."""
    data = text.buffers[0].tobytes()
    items = np.empty(len(text), dtype=object)
    items[:] = [data[start:stop] for start, stop in zip(text.offsets[:-1], text.offsets[1:], strict=True)]
    count = int(np.prod(row_shape, dtype=np.int64))
    return items.reshape(len(items) // max(count, 1), *row_shape)
