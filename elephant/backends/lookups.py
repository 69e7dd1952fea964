"""Lookups: slices of embeddings of all ranks, made what one process has.

Of places that are the same whatever rows a batch has, such as positions, one process has one slice for each place, to
which all rows contribute before its optimizer squares it. Several ranks have a slice each, to be added, place by place.
Rows that the batch itself names, or places that are repeated for each of its rows, have several slices in one process
too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

# Numbers of lookups: those from zero on are of rows that the batch neither names nor repeats.
BY_BATCH = -1
# A step that is not a graph does not tell: of the model's own as long as all ranks have the same places.
UNTOLD = -2

# Numbers of lookups; indices, values, and how many of them each lookup has.
Slices = tuple[Sequence[int], np.ndarray, np.ndarray, np.ndarray]


class Places(NamedTuple):
    """Lookups that a gradient's slices are of, in a step that is no graph.

    Args:
        numbers: Of one lookup, or of two: one of places of the model's own and one of those that the batch names.
        own: Slices of the lookup of the model's own places where there are two.
    """

    numbers: tuple[int, ...]
    own: int = 0

    def sizes(self, total: int) -> list[int]:
        """Returns how many slices each lookup has, of so many."""
        if len(self.numbers) == 1:
            return [total]
        return [total - self.own if number == BY_BATCH else self.own for number in self.numbers]


def added_up(
    numbers: Sequence[int],
    indices: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    sizes: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slices of all ranks, (indices, values), with those added that one process has once.

    All ranks find the same, because each has what all have sent.

    Args:
        indices: Of each rank, shape (slices,).
        values: Of each rank, shape (slices, ...).
        sizes: Of each rank, shape (lookups,): slices of each lookup.
    """
    ends = [np.cumsum(own)[:-1] for own in sizes]
    rows = zip(*map(np.split, indices, ends), strict=True)
    parts = zip(*map(np.split, values, ends), strict=True)
    found = [_of_lookup(*one) for one in zip(numbers, rows, parts, strict=True)]
    return np.concatenate([own for own, _ in found]), np.concatenate([sums for _, sums in found])


def are_equal(rows: Sequence[np.ndarray]) -> bool:
    """Returns whether all ranks that have slices have them of the same places."""
    named = [own for own in rows if len(own)]
    return all(np.array_equal(own, named[0]) for own in named)


def _of_lookup(number: int, rows: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    named = [place for place, own in enumerate(rows) if len(own)]
    if number != BY_BATCH and named and are_equal(rows):
        given = [parts[place] for place in named]
        return rows[named[0]], np.sum(given, axis=0, dtype=given[0].dtype)
    if number >= 0 and any(_has_twice(own) for own in rows):
        _warn_of_lengths()
    elif number >= 0:
        return _of_other_lengths(rows, parts)
    return np.concatenate(rows), np.concatenate(parts)


def _of_other_lengths(rows: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    together = np.unique(np.concatenate(rows))
    sums = np.zeros((len(together), *parts[0].shape[1:]), parts[0].dtype)
    for own, part in zip(rows, parts, strict=True):
        sums[np.searchsorted(together, own)] += part
    return together, sums


def _has_twice(rows: np.ndarray) -> bool:
    return len(np.unique(rows)) < len(rows)


@functools.cache
def _warn_of_lengths() -> None:
    logger.warning(
        "lookups: expected places of the model's own that are the same on all ranks. Received: others, as of batches "
        "of other lengths, which name a row of an embedding more than once. An optimizer that squares gradients then "
        "takes other steps than in one process. Pad all rows to one length."
    )
