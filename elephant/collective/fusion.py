"""Many small arrays in a few flat buffers, so that one allreduce carries them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elephant.collective.base import Collective
from elephant.collective.reduction import check_reduction, is_half
from elephant.errors import ConfigurationError

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class _Slot:
    """Where one array lies: its part of a flat buffer, in its shape, and the dtype that it came in."""

    view: np.ndarray
    dtype: np.dtype


class FusedBuffer:
    """Flat buffers, one per dtype, for a fixed list of arrays.

    Arrays of 16-bit floats (float16, bfloat16) are reduced in float32 and cast back.
    The memory is taken once.

    Args:
        specs: Shape and dtype of each array, in the order in which they are packed.
        extra: Float32 values of the caller's that travel behind the float32 arrays.

    Raises:
        ConfigurationError: An array has a dtype that cannot be reduced.

    Example:
        >>> from elephant.collective import Solo
        >>> buffer = FusedBuffer([((2,), "float32"), ((), "float64")], extra=1)
        >>> buffer.pack([np.array([1.0, 2.0], "float32"), np.array(3.0)], scale=0.5)
        >>> buffer.allreduce(Solo())
        >>> [array.tolist() for array in buffer.unpack()]
        [[0.5, 1.0], 1.5]
    """

    def __init__(self, specs: Sequence[tuple[Sequence[int], np.typing.DTypeLike]], *, extra: int = 0) -> None:
        kept = [(tuple(shape), np.dtype(dtype)) for shape, dtype in specs]
        lengths: dict[np.dtype, int] = {_FLOAT32: 0} if extra else {}
        starts = []
        for shape, dtype in kept:
            reduced = _reduced_dtype(dtype)
            starts.append(lengths.setdefault(reduced, 0))
            lengths[reduced] += math.prod(shape)
        self._extra_start = lengths.get(_FLOAT32, 0)
        if extra:
            lengths[_FLOAT32] += extra
        self._buffers = {dtype: np.zeros(length, dtype) for dtype, length in lengths.items()}
        self._slots = [
            _Slot(self._buffers[_reduced_dtype(dtype)][start : start + math.prod(shape)].reshape(shape), dtype)
            for (shape, dtype), start in zip(kept, starts, strict=True)
        ]
        self._extra = self._buffers[_FLOAT32][self._extra_start :] if extra else np.zeros(0, np.float32)

    @property
    def extra(self) -> np.ndarray:
        """The caller's float32 values: set before ``allreduce``, summed over all ranks after it."""
        return self._extra

    @property
    def nbytes(self) -> int:
        """Length of all buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

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
        for index, (array, slot) in enumerate(zip(arrays, self._slots, strict=True)):
            array = np.asarray(array)
            if array.shape != slot.view.shape or array.dtype != slot.dtype:
                raise ConfigurationError(
                    f"arrays[{index}]: expected {slot.dtype} of shape {slot.view.shape}. "
                    f"Received: {array.dtype} of shape {array.shape}."
                )
            _write_scaled(array, scale, slot.view)

    def allreduce(self, collective: Collective) -> None:
        """Sums the buffers over all ranks, in place; raises what ``Collective.allreduce_`` raises."""
        for buffer in self._buffers.values():
            collective.allreduce_(buffer)

    def unpack(self) -> list[np.ndarray]:
        """Returns the arrays in the order, shapes and dtypes of the specs.

        They are views that the next ``pack`` overwrites, except for 16-bit floats, which are cast.
        """
        return [slot.view if slot.view.dtype == slot.dtype else slot.view.astype(slot.dtype) for slot in self._slots]


def _reduced_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which an array is summed."""
    check_reduction(dtype, "sum")
    return _FLOAT32 if is_half(dtype) else dtype


def _write_scaled(array: np.ndarray, scale: float, view: np.ndarray) -> None:
    if scale == 0.0:
        view[...] = 0
    elif view.dtype.kind == "i":
        if scale != int(scale):
            raise ConfigurationError(f"scale: expected a whole number for {view.dtype}. Received: {scale!r}.")
        np.multiply(array, view.dtype.type(int(scale)), out=view)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(array, view.dtype.type(scale), out=view, dtype=view.dtype, casting="unsafe")
