"""Gradients of a step by how those of a batch's parts make those of the batch: means over rows, sums, or neither.

Of gradients that are slices, the places that they name tell which lookups they are of, in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elephant.backends.gradient_averager import Name
from elephant.backends.lookups import BY_BATCH, Places

logger = logging.getLogger(__name__)

# What a gradient is of its rows.
MEAN, SUM, NEITHER = "mean", "sum", "neither"

# Part of the largest gradient of a call: smaller ones are rounding.
_ROUNDING = 1e-6

# A dense gradient, or indices and values of slices.
Gradient = np.ndarray | tuple[np.ndarray, np.ndarray]


@dataclass
class Notes:
    """Gradients of one step, in the order of the calls of optimizers; each by its variable's name."""

    calls: list[dict[Name, Gradient]] = field(default_factory=list)

    def take(self, owner: int, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Takes the gradients of a call in the place of an update."""
        given = zip(gradients, variables, strict=True)
        self.calls.append({(owner, id(variable)): on_host(one) for one, variable in given if one is not None})

    def __getitem__(self, name: Name) -> list[Gradient]:
        return [call[name] for call in self.calls if name in call]


@dataclass(frozen=True)
class GradientInfo:
    """Facts about a step's gradients that nothing but a rehearsal tells.

    Args:
        sums: Names of those that are sums.
        places: Of those that are slices, what lookups they are of; empty where the step is a graph, which tells.
    """

    sums: frozenset[Name] = frozenset()
    places: Mapping[Name, Places] = field(default_factory=dict)

    def to_rows(self, names: Sequence[Name]) -> np.ndarray:
        """Returns them in a form for other processes, whose ids are others.

        Args:
            names: Of all gradients, in an order that processes share.
        """
        rows = []
        for number, name in enumerate(names):
            numbers, own = self.places.get(name, Places(()))
            if name in self.sums or numbers:
                rows.append([number, name in self.sums, own, len(numbers), *numbers, *(0,) * (2 - len(numbers))])
        return np.array(rows, np.int64).reshape(-1, 6)

    @classmethod
    def from_rows(cls, rows: np.ndarray, names: Sequence[Name]) -> GradientInfo:
        """Reads the form of `to_rows`."""
        sums, places = set(), {}
        for number, is_sum, own, lookups, *numbers in rows.reshape(-1, 6).tolist():
            if is_sum:
                sums.add(names[number])
            if lookups:
                places[names[number]] = Places(tuple(numbers[:lookups]), own)
        return cls(frozenset(sums), places)


def kinds(
    whole_notes: Notes, part_notes: Sequence[Notes], shares: Sequence[float], tolerance: float
) -> dict[Name, str]:
    """Returns the kind of each gradient, `MEAN`, `SUM` or `NEITHER`, by how those of the parts make that of the whole.

    One that is zero but for rounding is what the others of its call are.

    Args:
        shares: Each part's rows over those of the whole.
    """
    found: dict[Name, str] = {}
    for calls in zip(whole_notes.calls, *(part.calls for part in part_notes), strict=True):
        # A step may leave gradients out as its rows are.
        common = set.intersection(*map(set, calls))
        compared = {name: aligned([call[name] for call in calls]) for name in calls[0] if name in common}
        largest = {name: max(np.abs(one).max(initial=0.0) for one in given) for name, given in compared.items()}
        if not np.isfinite(list(largest.values())).all():
            raise ValueError("its gradients are not finite")
        rounding = _ROUNDING * max(largest.values(), default=0.0)
        told = {
            name: _kind(given, shares, tolerance * largest[name] + rounding)
            for name, given in compared.items()
            if largest[name] > rounding
        }
        others = {*told.values()}
        for name in dict.fromkeys(name for call in calls for name in call):
            kind = told.get(name, others.copy().pop() if len(others) == 1 else MEAN)
            found[name] = kind if found.get(name, kind) == kind else NEITHER
    return found


def _kind(given: Sequence[np.ndarray], shares: Sequence[float], most: float) -> str:
    whole, *parts = given
    for kind, weights in ((MEAN, shares), (SUM, [1.0] * len(parts))):
        total = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        if np.abs(total - whole).max(initial=0.0) <= most:
            return kind
    return NEITHER


def places_of(whole_notes: Notes, part_notes: Sequence[Notes], rows: Sequence[int]) -> dict[Name, Places]:
    """Returns of which lookups slices are, by their places in a batch and in its parts; nothing of those unknown.

    Args:
        rows: Of each part.
    """
    found = {}
    for name in {name for call in whole_notes.calls for name in call}:
        given = [
            one[0] for one in (whole_notes[name][0], *(part[name][0] for part in part_notes)) if isinstance(one, tuple)
        ]
        places = _places(given[0], given[1:], rows) if given else None
        if places is not None:
            found[name] = places
    return found


def _places(whole: np.ndarray, parts: Sequence[np.ndarray], rows: Sequence[int]) -> Places | None:
    # Rows without a change: there are as many of them in all parts.
    per_row, left = divmod(len(parts[0]) - len(parts[1]), rows[0] - rows[1]) if rows[0] != rows[1] else (-1, 0)
    if rows[0] == rows[1]:
        per_row, left = divmod(len(whole) - len(parts[0]), rows[1])
    own = len(parts[0]) - per_row * rows[0]
    if left or own < 0 or len(whole) != own + per_row * sum(rows):
        return _of_unique(whole, parts)
    if own == 0:
        return Places((BY_BATCH,))
    if per_row == 0:
        return Places((0,))
    first = [part[:own] for part in (whole, *parts)], [part[own:] for part in (whole, *parts)]
    last = [part[-own:] for part in (whole, *parts)], [part[:-own] for part in (whole, *parts)]
    fits = [_fits(*first), _fits(*last)]
    if sum(fits) != 1:
        logger.warning(
            "lookups: expected a table that an eager step reads at places of its own and at those of the batch, each "
            "once. Received: more. An optimizer that squares gradients may take other steps than in one process. "
            "Leave run_eagerly out."
        )
        return Places((BY_BATCH,))
    return Places((0, BY_BATCH) if fits[0] else (BY_BATCH, 0), own)


def _fits(own: Sequence[np.ndarray], of_batch: Sequence[np.ndarray]) -> bool:
    whole, *parts = of_batch
    same = all(np.array_equal(one, own[0]) for one in own)
    return same and np.array_equal(whole, np.concatenate(parts))


def _of_unique(whole: np.ndarray, parts: Sequence[np.ndarray]) -> Places | None:
    """Returns the one lookup of places that the step has told apart, each of them once."""
    is_without_repeated = all(len(np.unique(one)) == len(one) for one in (whole, *parts))
    return Places((0,)) if is_without_repeated and {*whole} == {*np.concatenate(parts)} else None


def length_of(calls: Sequence[Mapping[Name, Gradient]]) -> float:
    """Returns the length of the mean of one call's gradients over several draws."""
    squares = 0.0
    for name in calls[0]:
        squares += float(np.sum(np.square(np.mean(aligned([call[name] for call in calls]), axis=0))))
    if not np.isfinite(squares):
        raise ValueError("its gradients are not finite")
    return float(squares**0.5)


def aligned(given: Sequence[Gradient]) -> list[np.ndarray]:
    """Returns gradients of one variable as arrays of one shape: of slices, the rows that any of them names."""
    slices = [one for one in given if isinstance(one, tuple)]
    if not slices:
        return [np.asarray(one, np.float64) for one in given if isinstance(one, np.ndarray)]
    together = np.unique(np.concatenate([indices for indices, _ in slices]))
    aligned = []
    for indices, values in slices:
        sums = np.zeros((len(together), *values.shape[1:]))
        np.add.at(sums, np.searchsorted(together, indices), values)
        aligned.append(sums)
    return aligned


def on_host(gradient: Any) -> Gradient:
    """Returns an array, or of slices their indices and values."""
    import keras

    # PyTorch's tensors have methods of these names.
    if type(gradient).__name__ == "IndexedSlices":
        return np.array(gradient.indices), np.array(gradient.values)
    return np.array(keras.ops.convert_to_numpy(gradient))
