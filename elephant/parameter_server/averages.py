"""State that is no weight, such as the moving statistics of batch normalisation: averaged over the workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

Contribution = tuple[float, np.ndarray]


class Averages:
    """What each partition sent last, and the weighted average of it.

    Args:
        initial: Float64 of shape (num_state_values,): the average before anybody has sent anything.
        contributions: Weight and state by partition, from a snapshot.

    >>> averages = Averages(np.zeros(1))
    >>> averages.add(0, 1.0, np.array([2.0])), averages.add(1, 3.0, np.array([6.0]))
    (array([2.]), array([5.]))
    """

    def __init__(self, initial: np.ndarray, contributions: Mapping[int, Contribution] | None = None) -> None:
        self._initial = initial
        self._contributions = dict(contributions or {})
        self._lock = threading.Lock()

    def add(self, partition: int, weight: float, state: np.ndarray) -> np.ndarray:
        """Replaces a partition's contribution, where it is finite, and returns the average over all partitions.

        Args:
            partition: Whose it is.
            weight: What it counts: the rows that it was made of.
            state: Float64 of shape (num_state_values,).
        """
        with self._lock:
            if np.isfinite(weight) and weight > 0 and np.isfinite(state).all():
                self._contributions[partition] = (weight, state)
            return self._average()

    def average(self) -> np.ndarray:
        """Returns the average of what has been sent, float64 of shape (num_state_values,)."""
        with self._lock:
            return self._average()

    def contributions(self) -> dict[int, Contribution]:
        """Returns weight and state by partition."""
        with self._lock:
            return dict(self._contributions)

    def _average(self) -> np.ndarray:
        if not self._contributions:
            return self._initial.copy()
        # In the order of the partitions, so that the order in which they came does not show.
        parts = [self._contributions[partition] for partition in sorted(self._contributions)]
        total = sum(weight for weight, _ in parts)
        return np.sum([weight / total * state for weight, state in parts], axis=0)
