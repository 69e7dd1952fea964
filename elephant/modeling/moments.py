"""Mean and variance of values that lie in many places: computed in each, and put together exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """How many values there are, their mean, and the sum of their squared distances from it.

    Args:
        count: Values behind each element of the mean.
        mean: float64.
        squares: float64, of the mean's shape.
    """

    count: int
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, kept: Sequence[int]) -> Moments:
        """Returns the moments of an array over all axes but some.

        Args:
            values: Numbers, at least one.
            kept: The axes that are not reduced, from zero.

        >>> Moments.of(np.array([[1.0, 2.0], [3.0, 6.0]]), kept=(1,)).variance.tolist()
        [1.0, 4.0]
        """
        reduced = tuple(axis for axis in range(values.ndim) if axis not in kept)
        wide = values.astype(np.float64)
        mean = wide.mean(axis=reduced, keepdims=True)
        squares = ((wide - mean) ** 2).sum(axis=reduced)
        count = int(np.prod([values.shape[axis] for axis in reduced], dtype=np.int64))
        return cls(count, mean.reshape(squares.shape), squares)

    @property
    def variance(self) -> np.ndarray:
        """The mean squared distance from the mean."""
        return self.squares / self.count

    def merged(self, other: Moments) -> Moments:
        """Returns the moments of both sets of values together (Chan, Golub & LeVeque 1979, formula 2.1)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + apart**2 * (self.count * other.count / count)
        return Moments(count, mean, squares)


def merged(parts: Iterable[Moments]) -> Moments | None:
    """Returns the moments of all parts together; None of no part.

    >>> parts = [Moments.of(np.arange(start, 10.0), kept=()) for start in (0, 4)]
    >>> both = merged(parts)
    >>> both.count, float(both.mean)
    (16, 5.25)
    """
    total: Moments | None = None
    for part in parts:
        total = part if total is None else total.merged(part)
    return total
