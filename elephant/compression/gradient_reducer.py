"""Summing one flat array of gradients over all ranks, compressed or not: what the training side calls.

`elephant.compression.registry.reduction_for` makes a reduction from its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from elephant.compression.codec import Codec
from elephant.errors import ConfigurationError

# Start in the flat array, and shape, of each array in it.
Slices = Sequence[tuple[int, tuple[int, ...]]]


class Exchange(Protocol):
    """The part of a collective that reductions need; ``elephant.collective.Communicator`` has it."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def crosses_hosts(self) -> bool:
        """Whether ranks are on different hosts; the same answer on all of them."""

    def allreduce_(self, array: np.ndarray, op: str = "sum", *, codec: Codec | None = None) -> None:
        """Replaces the array by the sum over all ranks, to the same bits on all."""

    def allgather(self, array: np.ndarray) -> list[np.ndarray]:
        """Returns every rank's array, by rank."""


class GradientReducer(ABC):
    """Sums the gradients of one step over all ranks; every rank makes its own, with the same arguments.

    What a reduction loses it keeps, and adds to the next call's gradients: one object serves
    one flat array, from step to step. On one host nothing is compressed.

    What lies behind the arrays, such as a flag that travels with them, is never compressed.

    Args:
        slices: Start and shape of each array in the flat one, in the order in which they lie; between them may be gaps.

    Raises:
        ConfigurationError: The arrays overlap.
    """

    def __init__(self, slices: Slices) -> None:
        self._count = num_values(slices)

    def reduce_(self, flat: np.ndarray, collective: Exchange) -> None:
        """Replaces the array, on every rank, by the sum over all ranks, to the same bits on all.

        Args:
            flat: Float32 of one dimension, contiguous and writable, with the arrays at their places.

        Raises:
            ConfigurationError: The array is not float32 of one dimension, or too short.
            NetworkError: The exchange failed; the contents of the array are undefined.
        """
        if flat.dtype != np.float32 or flat.ndim != 1 or flat.size < self._count:
            raise ConfigurationError(
                f"flat: expected float32 of one dimension and at least {self._count} values. "
                f"Received: {flat.dtype} of shape {flat.shape}."
            )
        if not collective.crosses_hosts:
            collective.allreduce_(flat)
            return
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            self._reduce(flat, collective)

    @abstractmethod
    def _reduce(self, flat: np.ndarray, collective: Exchange) -> None:
        """Sums over ranks of different hosts."""

    def _reduce_rest(self, flat: np.ndarray, collective: Exchange) -> None:
        """Sums what lies behind the arrays."""
        if flat.size > self._count:
            collective.allreduce_(flat[self._count :])


class Uncompressed(GradientReducer):
    """The plain sum, for fits without compression."""

    def _reduce(self, flat: np.ndarray, collective: Exchange) -> None:
        collective.allreduce_(flat)


class Encoded(GradientReducer):
    """A sum whose pieces travel encoded."""

    def __init__(self, slices: Slices, codec: Codec) -> None:
        super().__init__(slices)
        self._codec = codec

    def _reduce(self, flat: np.ndarray, collective: Exchange) -> None:
        collective.allreduce_(flat[: self._count], codec=self._codec)
        self._reduce_rest(flat, collective)


def num_values(slices: Slices) -> int:
    """Returns how many values there are up to the end of the last array; raises ConfigurationError for overlaps.

    >>> num_values([(0, (2, 3)), (6, (3,)), (16, ())])
    17
    """
    stop = 0
    for index, (start, shape) in enumerate(slices):
        size = math.prod(shape)
        if size and start < stop:
            raise ConfigurationError(
                f"slices[{index}]: expected a start from {stop} on, where the array before it ends. Received: {start}."
            )
        stop = max(stop, start + size)
    return stop
