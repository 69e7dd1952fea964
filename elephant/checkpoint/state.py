"""What a fit needs to go on from the end of an epoch, as plain values: JSON, and numpy arrays by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class FitState:
    """A fit at the end of an epoch.

    Args:
        epochs: Epochs that are done.
        history: One number per epoch and metric, over all workers, of all of them.
        arrays: By name; several of a kind are called ``kind/0``, ``kind/1`` and so on.
        facts: What is no array, as JSON values.

    >>> state = FitState(epochs=2, arrays={"model/0": np.zeros(3), "model/1": np.ones(2), "other/0": np.zeros(1)})
    >>> [array.tolist() for array in state.group("model")]
    [[0.0, 0.0, 0.0], [1.0, 1.0]]
    """

    epochs: int
    history: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def group(self, kind: str) -> list[np.ndarray]:
        """Returns the arrays of a kind, in order; none when there are none."""
        found: list[np.ndarray] = []
        while (name := f"{kind}/{len(found)}") in self.arrays:
            found.append(self.arrays[name])
        return found

    def without_arrays(self) -> FitState:
        """Returns what is left when the arrays are dropped: who only needs to know the epoch need not carry them."""
        return replace(self, arrays={})


def named(kind: str, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays of a kind by the names that `FitState.group` finds them by.

    >>> named("model", [np.zeros(1)])
    {'model/0': array([0.])}
    """
    return {f"{kind}/{index}": array for index, array in enumerate(arrays)}


def joined(before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Returns one history of two that follow one another.

    >>> joined({"loss": [3.0]}, {"loss": [2.0], "val_loss": [4.0]})
    {'loss': [3.0, 2.0], 'val_loss': [4.0]}
    """
    return {name: [*before.get(name, []), *after.get(name, [])] for name in {**before, **after}}
