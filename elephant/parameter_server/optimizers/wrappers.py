"""Wrappers of update rules: clipping and weight decay."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.optimizers.base import BLOCK_VALUES, Rule, Wrapped, scratch_block

NORMS = ("norm", "global_norm")


@dataclass(frozen=True, kw_only=True)
class NormClipping:
    """Clipping of a whole gradient, before it is cut into stripes, or into the parts of several servers.

    Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, 2013.

    Args:
        layout: The places of the variables.
        norm: The highest norm of each variable's gradient; None does not limit it.
        global_norm: The highest norm of all of them together; None does not limit it.
        loss_scale: What the gradient is divided by first.

    Example:
        >>> gradient = np.zeros(32, np.float32)
        >>> gradient[[0, 1, 16]] = 3, 4, 1
        >>> NormClipping(layout=Layout([("a", (2,)), ("b", (1,))]), norm=2.5).prepare(gradient)
        >>> gradient[[0, 1, 16]]
        array([1.5, 2. , 1. ], dtype=float32)
    """

    layout: Layout
    norm: float | None = None
    global_norm: float | None = None
    loss_scale: float | None = None

    def prepare(self, gradient: np.ndarray) -> None:
        """Clips in place.

        Args:
            gradient: Float32 of shape (``layout.num_values``,).
        """
        if self.loss_scale is not None:
            np.divide(gradient, self.loss_scale, out=gradient)
        if self.norm is not None:
            for view in self._parts(gradient):
                _clip_by_norm(view, self.norm)
        if self.global_norm is not None:
            norms = np.array([squared_norm(view) for view in self._parts(gradient)])
            np.multiply(gradient, _global_scale(np.float32(np.sqrt(norms.sum())), self.global_norm), out=gradient)

    def _parts(self, gradient: np.ndarray) -> list[np.ndarray]:
        return [gradient[segment.start : segment.stop] for segment in self.layout.segments]


def clipping_of(spec: Mapping[str, Any], layout: Layout) -> NormClipping:
    """Returns the clipping that `without_clipping` took out of a rule.

    Args:
        spec: ``{"norm": limit}`` or ``{"global_norm": limit}``, and ``"loss_scale"`` where there is one.

    Raises:
        ConfigurationError: It describes none.

    >>> clipping_of({"global_norm": 1.0}, Layout([("a", (2,))])).global_norm
    1.0
    """
    try:
        return NormClipping(layout=layout, **spec)
    except TypeError as error:
        raise ConfigurationError(f"clip: expected one of {', '.join(NORMS)}. Received: {dict(spec)!r}.") from error


def without_clipping(spec: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Takes out of a rule what needs the whole gradient: norms cannot be found from a part of it.

    Clipping by value stays, and so does a loss scale beside it.

    Args:
        spec: As for ``rule_of``.

    Returns:
        The rule without it, and what ``clipping_of`` makes the clipping of; None where there is none.

    >>> without_clipping({"name": "sgd", "learning_rate": 0.1, "clip": {"norm": 1.0}, "loss_scale": 8.0})
    ({'name': 'sgd', 'learning_rate': 0.1}, {'norm': 1.0, 'loss_scale': 8.0})
    >>> without_clipping({"name": "add"})
    ({'name': 'add'}, None)
    """
    rest = dict(spec)
    if not set(rest.get("clip") or ()) & set(NORMS):
        return rest, None
    clip = dict(rest.pop("clip"))
    if "loss_scale" in rest:
        clip["loss_scale"] = rest.pop("loss_scale")
    return rest, clip


class NormClipped(Wrapped):
    """A rule whose gradients are clipped by their norm while they are whole.

    Args:
        clip: As for `clipping_of`.
    """

    def __init__(self, inner: Rule, clip: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self._clip = dict(clip)

    def prepare(self, gradient: np.ndarray, layout: Layout) -> None:
        """Clips in place."""
        clipping_of(self._clip, layout).prepare(gradient)


class ValueClipped(Wrapped):
    """A rule whose gradients are cut back to a range."""

    def __init__(self, inner: Rule, limit: float) -> None:
        super().__init__(inner)
        self._limit = limit

    def change(self, gradient: np.ndarray) -> None:
        """Cuts in place."""
        np.minimum(gradient, self._limit, out=gradient)
        np.maximum(gradient, -self._limit, out=gradient)


class Unscaled(Wrapped):
    """A rule whose gradients are those of a loss that was multiplied by a factor.

    Micikevicius et al., Mixed Precision Training, 2018.
    """

    def __init__(self, inner: Rule, loss_scale: float) -> None:
        super().__init__(inner)
        self._loss_scale = loss_scale

    def change(self, gradient: np.ndarray) -> None:
        """Divides in place."""
        np.divide(gradient, self._loss_scale, out=gradient)


def squared_norm(values: np.ndarray) -> float:
    """Returns the sum of squares, summed in float64.

    >>> squared_norm(np.array([3, 4], np.float32))
    25.0
    """
    total = 0.0
    for first in range(0, len(values), BLOCK_VALUES):
        block = values[first : first + BLOCK_VALUES]
        # Not a dot product: BLAS would start threads, which on busy cores wait for one another a hundred times as long.
        with np.errstate(over="ignore"):
            squares = np.square(block, out=scratch_block(len(block)))
        total += float(np.add.reduce(squares, dtype=np.float64))
    return total


def _clip_by_norm(values: np.ndarray, limit: float) -> None:
    divisor = np.maximum(np.float32(np.sqrt(squared_norm(values))), np.float32(limit))
    for first in range(0, len(values), BLOCK_VALUES):
        block = values[first : first + BLOCK_VALUES]
        # Keras multiplies and divides short gradients too, which rounds them.
        np.multiply(block, limit, out=block)
        np.divide(block, divisor, out=block)


def _global_scale(norm: np.float32, limit: float) -> np.float32:
    with np.errstate(divide="ignore"):
        return np.float32(limit) * np.minimum(np.float32(1) / norm, np.float32(1 / limit))


class Decayed(Wrapped):
    """A rule before whose step ``values -= values * weight_decay * rate``, as Keras does it.

    Hanson and Pratt, Comparing Biases for Minimal Network Construction with Back-Propagation, 1988; beside Adam, it is
    what Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, call decoupled.

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
        """Yields the values that decay between two indices, as slices that count from the first."""
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
