"""Adagrad: each weight's rate shrinks with the gradients that it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.parameter_server.optimizers.base import Descent


@dataclass(frozen=True, kw_only=True)
class Adagrad(Descent):
    """Divides each weight's step by the root of the sum of its squared gradients.

    Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, 2011.

    Args:
        learning_rate: As for every rule.
        initial_accumulator_value: Where the sums begin.
        epsilon: Added to the sum, under the root.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    @property
    def slots(self) -> tuple[str, ...]:
        """The sum of squared gradients."""
        return ("accumulator",)

    def init(self, num_values: int) -> tuple[np.ndarray, ...]:
        """Returns one vector full of the initial value."""
        return (np.full(num_values, self.initial_accumulator_value, np.float32),)

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
        (accumulator,) = slots
        np.square(gradient, out=scratch)
        np.add(accumulator, scratch, out=accumulator)
        np.add(accumulator, self.epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.multiply(gradient, scalars, out=gradient)
        np.divide(gradient, scratch, out=gradient)
        np.subtract(values, gradient, out=values)
