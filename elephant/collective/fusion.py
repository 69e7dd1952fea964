"""Many small arrays in a few flat buffers, so that one allreduce carries them all."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elephant.collective.base import Collective
from elephant.collective.reduction import check_reduction, is_half
from elephant.errors import ConfigurationError

_FLOAT32 = np.dtype(np.float32)

# TensorFlow takes an array as it is, without a copy, when it begins at a multiple of this many bytes.
ALIGNMENT = 64

Spec = tuple[Sequence[int], "np.typing.DTypeLike"]


@dataclass(frozen=True)
class _Slot:
    """Where one array lies: its part of a flat buffer, in its shape, and the dtype that it came in."""

    view: np.ndarray
    dtype: np.dtype


class FusedBuffer:
    """Flat buffers, one per dtype, for a fixed list of arrays.

    Arrays of 16-bit floats (float16, bfloat16) are reduced in float32 and cast back.
    The memory is taken once; each array begins at a multiple of 64 bytes.

    Args:
        specs: Shape and dtype of each array, in the order in which they are packed.

    Raises:
        ConfigurationError: An array has a dtype that cannot be reduced.

    Example:
        >>> from elephant.collective import Solo
        >>> buffer = FusedBuffer([((2,), "float32"), ((), "float64")])
        >>> buffer.pack([np.array([1.0, 2.0], "float32"), np.array(3.0)], scale=0.5)
        >>> buffer.allreduce(Solo())
        >>> [array.tolist() for array in buffer.unpack()]
        [[0.5, 1.0], 1.5]
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        kept = [(tuple(shape), np.dtype(dtype)) for shape, dtype in specs]
        lengths: dict[np.dtype, int] = {}
        starts = []
        for shape, dtype in kept:
            reduced = _reduced_dtype(dtype)
            starts.append(_aligned(lengths.get(reduced, 0), reduced))
            lengths[reduced] = starts[-1] + math.prod(shape)
        self._buffers = {dtype: _aligned_zeros(length, dtype) for dtype, length in lengths.items()}
        self._slots = [
            _Slot(self._buffers[_reduced_dtype(dtype)][start : start + math.prod(shape)].reshape(shape), dtype)
            for (shape, dtype), start in zip(kept, starts, strict=True)
        ]
        self._references = self._count_references()

    @property
    def nbytes(self) -> int:
        """Length of all buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def lent(self) -> bool:
        """Whether somebody still holds one of the views that ``unpack`` returned."""
        return self._count_references() > self._references

    @property
    def float32_slices(self) -> list[tuple[int, tuple[int, ...]]]:
        """Where each array that is reduced in float32 lies in that buffer: its first element, and its shape."""
        base = self._buffers.get(_FLOAT32, np.zeros(0, _FLOAT32)).ctypes.data
        views = [slot.view for slot in self._slots if slot.view.dtype == _FLOAT32]
        return [((view.ctypes.data - base) // _FLOAT32.itemsize if view.size else 0, view.shape) for view in views]

    def pack(self, arrays: Sequence[np.ndarray], scale: float = 1.0) -> None:
        """Writes ``scale`` times each array into the buffers.

        Args:
            arrays: In the order and with the shapes of the specs.
            scale: For integer arrays a whole number. Zero writes zeros, whatever the arrays hold, NaN included.

        Raises:
            ConfigurationError: The arrays are not those that the buffer was made for.
        """
        if len(arrays) != len(self._slots):
            raise ConfigurationError(f"arrays: expected {len(self._slots)}. Received: {len(arrays)}.")
        with np.errstate(over="ignore", invalid="ignore"):
            for index, (array, slot) in enumerate(zip(arrays, self._slots, strict=True)):
                if array.shape != slot.view.shape or array.dtype != slot.dtype:
                    raise ConfigurationError(
                        f"arrays[{index}]: expected {slot.dtype} of shape {slot.view.shape}. "
                        f"Received: {array.dtype} of shape {array.shape}."
                    )
                _write_scaled(array, scale, slot.view)

    def allreduce(self, collective: Collective, reduce_float32: Callable[[np.ndarray], None] | None = None) -> None:
        """Sums the buffers over all ranks, in place; raises what ``Collective.allreduce_`` raises.

        Args:
            collective: Connects the ranks.
            reduce_float32: Sums the float32 buffer in place in another way, such as compressed.
        """
        for dtype, buffer in self._buffers.items():
            if dtype == _FLOAT32 and reduce_float32 is not None:
                reduce_float32(buffer)
            else:
                collective.allreduce_(buffer)

    def unpack(self) -> list[np.ndarray]:
        """Returns the arrays in the order, shapes and dtypes of the specs.

        They are views that the next ``pack`` overwrites, except for 16-bit floats, which are cast.
        """
        return [slot.view if slot.view.dtype == slot.dtype else slot.view.astype(slot.dtype) for slot in self._slots]

    def _count_references(self) -> int:
        return sum(sys.getrefcount(slot.view) for slot in self._slots)


def _reduced_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which an array is summed."""
    check_reduction(dtype, "sum")
    return _FLOAT32 if is_half(dtype) else dtype


def _aligned(count: int, dtype: np.dtype) -> int:
    """Returns the least number of elements from ``count`` on after which another array may begin."""
    step = ALIGNMENT // dtype.itemsize
    return -(-count // step) * step


def _aligned_zeros(count: int, dtype: np.dtype) -> np.ndarray:
    raw = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count * dtype.itemsize].view(dtype)


def _write_scaled(array: np.ndarray, scale: float, view: np.ndarray) -> None:
    if scale == 0.0:
        view[...] = 0
    elif view.dtype.kind == "i":
        if scale != int(scale):
            raise ConfigurationError(f"scale: expected a whole number for {view.dtype}. Received: {scale!r}.")
        np.multiply(array, view.dtype.type(int(scale)), out=view)
    else:
        np.multiply(array, view.dtype.type(scale), out=view, dtype=view.dtype, casting="unsafe")
