"""RMSprop: each weight's rate follows a moving average of its squared gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.parameter_server.optimizers.base import Descent


@dataclass(frozen=True, kw_only=True)
class RMSprop(Descent):
    """Divides each weight's step by the root of a moving average of its squared gradients.

    Hinton, Neural Networks for Machine Learning, lecture 6e, 2012. Centered: by an estimate of the gradient's
    variance, as in Graves, Generating Sequences With Recurrent Neural Networks, 2013.

    Args:
        learning_rate: As for every rule.
        rho: What an average keeps of itself in one update.
        momentum: What the last step adds to this one; none where it is zero.
        epsilon: Added to the average, under the root.
        centered: Whether the square of the average gradient is subtracted.
    """

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The average of squared gradients, that of gradients if centered, and the last step if there is momentum."""
        return ("velocity",) + ("average_gradient",) * self.centered + ("momentum",) * (self.momentum > 0)

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
        velocity = slots[0]
        np.square(gradient, out=scratch)
        self._average(velocity, scratch, scratch)
        if self.centered:
            self._average(slots[1], gradient, scratch)
            np.square(slots[1], out=scratch)
            np.subtract(velocity, scratch, out=scratch)
            np.add(scratch, self.epsilon, out=scratch)
        else:
            np.add(velocity, self.epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.multiply(gradient, scalars, out=gradient)
        np.divide(gradient, scratch, out=gradient)
        if self.momentum > 0:
            np.multiply(slots[-1], self.momentum, out=slots[-1])
            np.add(slots[-1], gradient, out=slots[-1])
            gradient = slots[-1]
        np.subtract(values, gradient, out=values)

    def _average(self, average: np.ndarray, new: np.ndarray, scratch: np.ndarray) -> None:
        np.multiply(new, 1 - self.rho, out=scratch)
        np.multiply(average, self.rho, out=average)
        np.add(average, scratch, out=average)
