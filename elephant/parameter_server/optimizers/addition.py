"""What is pushed is added: for differences of weights that the workers' own optimizers have made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from elephant.parameter_server.optimizers.base import Rule


class Addition(Rule):
    """``values += update``. It has no learning rate.

    >>> weights, rule = np.ones(2, np.float32), Addition()
    >>> rule.update(rule.begin(0), 0, weights, np.array([1, 2], np.float32))
    >>> weights
    array([2., 3.], dtype=float32)
    """

    def rate(self, iteration: int) -> float:
        """Returns NaN."""
        return math.nan

    def begin(self, iteration: int, rate: float | None = None) -> None:
        """Returns nothing: there is nothing to have in common."""
        return None

    def update_block(
        self,
        scalars: None,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Adds."""
        np.add(values, gradient, out=values)
