"""Gradient descent: plain, with momentum, and with Nesterov's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.parameter_server.optimizers.base import Descent


class SGD(Descent):
    """Stochastic gradient descent: ``values -= rate * gradient``.

    Robbins and Monro, A Stochastic Approximation Method, 1951.

    >>> weights, rule = np.ones(2, np.float32), SGD(learning_rate=lambda iteration: 0.5)
    >>> rule.update(rule.begin(0), 0, weights, np.array([1, 2], np.float32))
    >>> weights
    array([0.5, 0. ], dtype=float32)
    """

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        # A gradient that is not written to is a third less for the memory to carry.
        np.multiply(gradient, scalars, out=scratch)
        np.subtract(values, scratch, out=values)


@dataclass(frozen=True, kw_only=True)
class Momentum(Descent):
    """Gradient descent that keeps a part of its last step.

    Polyak, Some methods of speeding up the convergence of iteration methods, 1964.

    Args:
        learning_rate: As for every rule.
        momentum: The part that is kept, in [0, 1].
    """

    momentum: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The last step."""
        return ("momentum",)

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        self._remember(scalars, gradient, slots[0], scratch)
        np.add(values, slots[0], out=values)

    def _remember(self, rate: np.float32, gradient: np.ndarray, momentum: np.ndarray, scaled: np.ndarray) -> None:
        np.multiply(gradient, rate, out=scaled)
        np.multiply(momentum, self.momentum, out=momentum)
        np.subtract(momentum, scaled, out=momentum)


class Nesterov(Momentum):
    """Momentum whose gradient counts as if it were taken one step of momentum ahead.

    Nesterov, A method for solving the convex programming problem with convergence rate O(1/k^2), 1983, in the form of
    Sutskever, Martens, Dahl and Hinton, On the importance of initialization and momentum in deep learning, 2013.
    """

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Takes one step."""
        self._remember(scalars, gradient, slots[0], scratch)
        np.multiply(slots[0], self.momentum, out=gradient)
        np.subtract(gradient, scratch, out=gradient)
        np.add(values, gradient, out=values)
