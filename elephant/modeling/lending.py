"""Flat weights that TensorFlow may go on reading: buffers used in turn, none overwritten while it is held."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from elephant.parameter_server.layout import Layout


class LentWeights:
    """One flat vector, and the views of it that are lent to TensorFlow without a copy.

    Args:
        layout: The places of the weights.

    Attributes:
        flat: float32, aligned to 64 bytes.
        views: Each variable's part, in its shape.
    """

    def __init__(self, layout: Layout) -> None:
        self.flat = layout.zeros()
        self.views = layout.views(self.flat)
        self._references = self._count_references()

    @property
    def lent(self) -> bool:
        """Whether somebody still holds one of the views."""
        return self._count_references() > self._references

    def _count_references(self) -> int:
        return sum(sys.getrefcount(view) for view in self.views)


class WeightBuffers:
    """As many `LentWeights` as are needed at the same time: two or three.

    Args:
        layout: The places of the weights.
        release: Makes the framework give back arrays that it has done with.
    """

    def __init__(self, layout: Layout, release: Callable[[], object]) -> None:
        self._layout = layout
        self._release = release
        self._buffers: list[LentWeights] = []

    def unused(self, *kept: LentWeights | None) -> LentWeights:
        """Returns a buffer that nobody holds a view of.

        Args:
            kept: Buffers that are still needed, whether somebody holds them or not.
        """
        buffer = self._first_unused(kept)
        if buffer is None:
            self._release()
            buffer = self._first_unused(kept)
        if buffer is None:
            buffer = LentWeights(self._layout)
            self._buffers.append(buffer)
        return buffer

    def __len__(self) -> int:
        return len(self._buffers)

    def _first_unused(self, kept: Sequence[LentWeights | None]) -> LentWeights | None:
        taken = {id(buffer) for buffer in kept}
        return next((buffer for buffer in self._buffers if id(buffer) not in taken and not buffer.lent), None)


def copy_parts(parts: Sequence[np.ndarray], positions: Sequence[int], places: Sequence[np.ndarray]) -> None:
    """Writes arrays to some of the places of a flat vector, and zeros to the others.

    Args:
        parts: One array for each position.
        positions: Which of the places they are for.
        places: Views of the flat vector, one for each variable.
    """
    for position in set(range(len(places))) - set(positions):
        places[position][...] = 0
    for part, position in zip(parts, positions, strict=True):
        np.copyto(places[position], part)
