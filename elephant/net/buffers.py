"""Memory that a framework reads without a copy: aligned arrays, and buffers that are used in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

# TensorFlow takes an array as it is, without a copy, when it begins at a multiple of this many bytes.
ALIGNMENT = 64
B = TypeVar("B", bound="SharedBuffer")


def aligned_vector(
    count: int, dtype: np.typing.DTypeLike = np.float32, allocate: Callable[..., np.ndarray] = np.empty
) -> np.ndarray:
    """Returns an array of shape (count,), whose memory begins at a multiple of 64 bytes."""
    num_bytes = count * np.dtype(dtype).itemsize
    raw = allocate(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype)


def portable(array: np.ndarray) -> np.ndarray:
    """Returns an array as frames and files carry it, C-contiguous: bfloat16 as float32, of the same numbers."""
    # Not ascontiguousarray, which makes scalars arrays of one element.
    return np.asarray(array, np.float32 if array.dtype.name == "bfloat16" else None, order="C")


def equal_bits(value: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays are of the same shape, dtype and bits, so that NaN equals itself, and zero not -0.

    >>> equal_bits(np.array([np.nan, 0.0]), np.array([np.nan, 0.0])), equal_bits(np.array([0.0]), np.array([-0.0]))
    (True, False)
    """
    if value is other:
        return True
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    word = f"u{value.itemsize}" if value.itemsize in (1, 2, 4, 8) else "u1"
    words, others = (np.ascontiguousarray(one).reshape(-1).view(word) for one in (value, other))
    return np.array_equal(words, others)


class SharedBuffer:
    """Memory of which views are handed out without a copy."""

    def __init__(self, views: list[np.ndarray]) -> None:
        self.views = views
        self._references = self._count_references()

    @property
    def in_use(self) -> bool:
        """True if somebody still holds one of the views."""
        return self._count_references() > self._references

    def _count_references(self) -> int:
        return sum(sys.getrefcount(view) for view in self.views)


class RotatingBuffers(Generic[B]):
    """As many buffers as are needed at the same time: two or three."""

    def __init__(self, make: Callable[[], B]) -> None:
        self._make = make
        self._buffers: list[B] = []

    def unused(self, *kept: B, release: Callable[[], object] | None = None) -> B:
        """Returns a buffer that nobody holds a view of."""
        buffer = self._first_unused(kept)
        if buffer is None and release is not None:
            release()
            buffer = self._first_unused(kept)
        if buffer is None:
            buffer = self._make()
            self._buffers.append(buffer)
        return buffer

    def _first_unused(self, kept: tuple[B, ...]) -> B | None:
        return next((buffer for buffer in self._buffers if buffer not in kept and not buffer.in_use), None)
