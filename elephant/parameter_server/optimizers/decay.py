"""Weights that shrink at every update, whatever their gradient."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError
from elephant.parameter_server.optimizers.base import Rule, Wrapped


class Decayed(Wrapped):
    """A rule before whose step ``values -= values * weight_decay * rate``, as Keras does it.

    Hanson and Pratt, Comparing Biases for Minimal Network Construction with Back-Propagation, 1988; beside Adam, it is
    what Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, call decoupled.

    Args:
        inner: The rule.
        rate: The weight decay, which the learning rate multiplies.
        excluded: Start and stop of what does not decay in the vector of all variables, growing.

    Raises:
        ConfigurationError: The excluded ranges overlap or do not grow.
    """

    def __init__(self, inner: Rule, *, rate: float, excluded: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(inner)
        self._rate = rate
        self._bounds = [int(bound) for pair in excluded for bound in pair]
        if self._bounds != sorted(self._bounds) or any(len(pair) != 2 for pair in excluded):
            raise ConfigurationError(f"excluded: expected growing pairs of start and stop. Received: {excluded!r}.")

    def begin(self, iteration: int, rate: float | None = None) -> Any:
        """Returns the learning rate, and what the inner rule makes of it."""
        rate = self.inner.rate(iteration) if rate is None else rate
        return np.float32(rate), self.inner.begin(iteration, rate)

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Shrinks the weights, then does what the inner rule does."""
        learning_rate, inner_scalars = scalars
        for part in self._parts(start, start + len(values)):
            np.multiply(values[part], self._rate, out=scratch[part])
            np.multiply(scratch[part], learning_rate, out=scratch[part])
            np.subtract(values[part], scratch[part], out=values[part])
        self.inner.update_block(inner_scalars, start, values, gradient, slots, scratch)

    def _parts(self, start: int, stop: int) -> Iterator[slice]:
        """Yields what decays between two indices, as slices that count from the first."""
        # Bounds at even places begin an excluded range, those at odd places end one.
        place = bisect_right(self._bounds, start)
        first = start if place % 2 == 0 else None
        for index in range(place, len(self._bounds)):
            bound = min(self._bounds[index], stop)
            if first is not None and bound > first:
                yield slice(first - start, bound - start)
            first = None if index % 2 == 0 else bound
            if bound == stop:
                return
        if first is not None:
            yield slice(first - start, stop - start)
