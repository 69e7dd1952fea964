"""Update rules: the interface, and plain addition."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elephant.parameter_server.layout import Layout

# The weights, gradient, slots and scratch memory of so many values stay in a core's caches; shorter blocks spend
# more time between two calls of numpy.
BLOCK_VALUES = 65536
Schedule = Callable[[int], float]


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.block = np.empty(BLOCK_VALUES, np.float32)


_SCRATCH = _Scratch()


def scratch_block(count: int) -> np.ndarray:
    """Returns this thread's scratch memory, float32 of shape (count,) and of any content.

    Args:
        count: At most ``BLOCK_VALUES``.

    >>> scratch_block(3).shape
    (3,)
    """
    return _SCRATCH.block[:count]


class Rule(ABC):
    """An optimizer as a pair of functions, one that makes its slots and one that updates in place.

    The weights and the slots are flat float32 vectors, whole or the part of one server, and belong to the
    caller. A rule keeps no state between two updates, and several threads may update different stripes at
    once. Scratch memory is one block for each thread.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the vectors that the rule keeps besides the weights, each as long as they are."""
        return ()

    def init(self, num_values: int) -> tuple[np.ndarray, ...]:
        """Returns new slots for so many weights, float32, in the order of ``slots``."""
        return tuple(np.zeros(num_values, np.float32) for _ in self.slots)

    @abstractmethod
    def rate(self, iteration: int) -> float:
        """Returns the learning rate of the update before which ``iteration`` others were applied."""

    @abstractmethod
    def begin(self, iteration: int, rate: float | None = None) -> Any:
        """Returns the values that all stripes of one update have in common, for ``update``.

        Args:
            iteration: Updates applied before this one.
            rate: The learning rate, in place of the rule's constant or schedule; None leaves it to those.
        """

    def prepare(self, gradient: np.ndarray, layout: Layout) -> None:
        """Changes a gradient in place before it is cut into stripes: only norms need it, and most rules do nothing.

        Args:
            gradient: Float32 of shape (``layout.num_values``,), of all variables.
            layout: Their places.
        """
        return

    def update(
        self, scalars: Any, start: int, values: np.ndarray, gradient: np.ndarray, slots: Sequence[np.ndarray] = ()
    ) -> None:
        """Applies one stripe of a gradient, in place.

        Args:
            scalars: What ``begin`` returned for this update.
            start: Index of the stripe's first value in the vector of all variables.
            values: The weights, float32 of shape (count,).
            gradient: Float32 of shape (count,). It may be overwritten.
            slots: Float32 of shape (count,) each, in the order of the rule's ``slots``.
        """
        for first in range(0, len(values), BLOCK_VALUES):
            cut = slice(first, first + BLOCK_VALUES)
            block = values[cut]
            parts = [slot[cut] for slot in slots]
            self.update_block(scalars, start + first, block, gradient[cut], parts, scratch_block(len(block)))

    @abstractmethod
    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Does ``update``'s work on at most ``BLOCK_VALUES`` values, so that what it passes over again is still near.

        Args:
            scalars: As for ``update``.
            start: As for ``update``.
            values: As for ``update``.
            gradient: As for ``update``.
            slots: As for ``update``.
            scratch: Float32 of shape (count,), of any content.
        """


@dataclass(frozen=True, kw_only=True)
class Descent(Rule):
    """A rule with a learning rate.

    Args:
        learning_rate: The rate of the update before which so many others were applied.
    """

    learning_rate: Schedule

    def rate(self, iteration: int) -> float:
        """Returns the schedule's rate."""
        return self.learning_rate(iteration)

    def begin(self, iteration: int, rate: float | None = None) -> Any:
        """Returns the learning rate as the float32 that the weights are updated with."""
        return np.float32(self.rate(iteration) if rate is None else rate)


class Wrapped(Rule):
    """A rule that does something before another one and leaves the rest to it.

    Args:
        inner: The other rule.
    """

    def __init__(self, inner: Rule) -> None:
        self.inner = inner

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the inner rule's slots."""
        return self.inner.slots

    def init(self, num_values: int) -> tuple[np.ndarray, ...]:
        """Returns the inner rule's slots."""
        return self.inner.init(num_values)

    def rate(self, iteration: int) -> float:
        """Returns the inner rule's learning rate."""
        return self.inner.rate(iteration)

    def begin(self, iteration: int, rate: float | None = None) -> Any:
        """Begins an update of the inner rule."""
        return self.inner.begin(iteration, rate)

    def prepare(self, gradient: np.ndarray, layout: Layout) -> None:
        """Does what the inner rule does."""
        self.inner.prepare(gradient, layout)

    def change(self, gradient: np.ndarray) -> None:
        """Changes one block of a gradient, in place, before the inner rule gets it; most leave it as it is."""

    def update_block(
        self,
        scalars: Any,
        start: int,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Sequence[np.ndarray],
        scratch: np.ndarray,
    ) -> None:
        """Changes the gradient, then does what the inner rule does."""
        self.change(gradient)
        self.inner.update_block(scalars, start, values, gradient, slots, scratch)


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
