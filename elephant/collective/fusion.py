"""Fusion: small arrays travel in one buffer, in buckets of a bounded size.

The backward pass finds the last layer's gradients first. Buckets filled from the
end of the list can be summed over the ranks while earlier layers are still being
computed (Li et al. 2020, "PyTorch Distributed", section 3.2).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elephant.collective.communicator import Communicator
from elephant.collective.operation import check_reduction, is_half
from elephant.errors import ConfigurationError, ProtocolError
from elephant.net.buffers import ALIGNMENT, SharedBuffer, aligned_vector

_MEGABYTE = 1 << 20
# Below this much there is too little to hide behind the backward pass.
WORTH_SPLITTING = 8 * _MEGABYTE
_SMALLEST, _LARGEST = 4 * _MEGABYTE, 32 * _MEGABYTE
_BUCKETS = 6
# From here on a link is as fast as the processor copies, and sending takes the time that it should hide.
_FAST_BYTES_PER_S = 2e9
_PROBE_BYTES = 2 * _MEGABYTE
_PROBES = 3

_FLOAT32 = np.dtype(np.float32)
Spec = tuple[Sequence[int], "np.typing.DTypeLike"]


@dataclass(frozen=True)
class LinkSpeed:
    """Measured cost of an allreduce.

    Args:
        latency_s: Seconds of one of a few bytes.
        bytes_per_s: Bytes of the array per second, for long ones.
    """

    latency_s: float
    bytes_per_s: float


def measure_link(communicator: Communicator) -> LinkSpeed:
    """Times a few allreduces; all ranks call it, and all get the same numbers."""
    tiny, long = np.zeros(1, np.float32), np.zeros(_PROBE_BYTES // 4, np.float32)
    # The first ones grow socket buffers.
    took = [[_seconds(communicator, array) for _ in range(_PROBES + 1)][1:] for array in (tiny, long)]
    slowest = np.array([min(times) for times in took])
    communicator.allreduce_(slowest, "max")
    return LinkSpeed(latency_s=float(slowest[0]), bytes_per_s=_PROBE_BYTES / float(slowest[1]))


def _seconds(communicator: Communicator, array: np.ndarray) -> float:
    began = time.perf_counter()
    communicator.allreduce_(array)
    return time.perf_counter() - began


def automatic_bucket_bytes(total_bytes: int, link: LinkSpeed) -> int:
    """Returns how long buckets should be: several for much data on a slow link, else one.

    A bucket is long enough that its latency is a twentieth of its time at most.

    Args:
        total_bytes: Length of all gradients.
        link: What the ranks measured.

    Examples:
        >>> automatic_bucket_bytes(96 << 20, LinkSpeed(latency_s=1e-4, bytes_per_s=5e8)) >> 20
        16
        >>> automatic_bucket_bytes(96 << 20, LinkSpeed(latency_s=1e-4, bytes_per_s=5e9)) >> 20
        96
    """
    if total_bytes < WORTH_SPLITTING or link.bytes_per_s >= _FAST_BYTES_PER_S:
        return total_bytes
    even = min(max(total_bytes // _BUCKETS, _SMALLEST), _LARGEST)
    return min(max(even, int(20 * link.latency_s * link.bytes_per_s)), total_bytes)


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Divides arrays into buckets, from the last array to the first.

    Args:
        sizes: Bytes of each array, first layer first.
        bucket_bytes: A bucket is closed when it holds this much.

    Returns:
        The arrays' positions by bucket, buckets in the order in which they are full; every
        position is in one bucket, in descending order.

    Examples:
        >>> plan_buckets([10, 1, 1, 6, 3], 8)
        [[4, 3], [2, 1, 0]]
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(sizes))):
        if filled >= bucket_bytes and sizes[index]:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets if sizes else []


def require_same_specs(communicator: Communicator, specs: Sequence[Spec], what: str) -> None:
    """Raises ProtocolError, on all ranks, where they would put arrays of other shapes or dtypes into one buffer.

    Args:
        specs: This rank's, in the order in which they are packed.
        what: What they are, for the error.
    """
    own = "; ".join(f"{tuple(shape)} {np.dtype(dtype).name}" for shape, dtype in specs)
    told = communicator.allgather(np.frombuffer(own.encode(), np.uint8))
    texts = [bytes(part).decode() for part in told]
    for rank, text in enumerate(texts):
        if text != texts[0]:
            lists = [texts[0].split("; "), text.split("; ")]
            first = next(at for at, pair in enumerate(itertools.zip_longest(*lists)) if pair[0] != pair[1])
            shown = [one[first] if first < len(one) else "none" for one in lists]
            raise ProtocolError(
                f"Expected {what} of the same shapes and dtypes, in the same order, on all ranks. Received: number "
                f"{first} is {shown[0]} on rank 0, and {shown[1]} on rank {rank}. Build the same model on every rank."
            )


class FusedBuffer(SharedBuffer):
    """Flat buffers, one per dtype, for a fixed list of arrays.

    Arrays of 16-bit floats (float16, bfloat16) are reduced in float32 and cast back.
    The memory is taken once; each array begins at a multiple of 64 bytes.

    Args:
        specs: Shape and dtype of each array, in the order in which they are packed.

    Raises:
        ConfigurationError: An array has a dtype that cannot be reduced.

    Examples:
        >>> from elephant.collective import LocalCommunicator
        >>> buffer = FusedBuffer([((2,), "float32"), ((), "float64")])
        >>> buffer.pack([np.array([1.0, 2.0], "float32"), np.array(3.0)], scale=0.5)
        >>> buffer.allreduce(LocalCommunicator())
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
        self._buffers = {dtype: aligned_vector(length, dtype, np.zeros) for dtype, length in lengths.items()}
        self._dtypes = [dtype for _, dtype in kept]
        super().__init__(
            [
                self._buffers[_reduced_dtype(dtype)][start : start + math.prod(shape)].reshape(shape)
                for (shape, dtype), start in zip(kept, starts, strict=True)
            ]
        )

    @property
    def nbytes(self) -> int:
        """Length of all buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def float32_slices(self) -> list[tuple[int, tuple[int, ...]]]:
        """First element and shape of each array in the buffer that is reduced in float32."""
        base = self._buffers.get(_FLOAT32, np.zeros(0, _FLOAT32)).ctypes.data
        views = [view for view in self.views if view.dtype == _FLOAT32]
        return [((view.ctypes.data - base) // _FLOAT32.itemsize if view.size else 0, view.shape) for view in views]

    def pack(self, arrays: Sequence[np.ndarray], scale: float | Sequence[float] = 1.0) -> None:
        """Writes ``scale`` times each array into the buffers.

        Args:
            arrays: In the order and with the shapes of the specs.
            scale: Of all arrays, or of each. For integer arrays a whole number. Zero writes zeros, whatever the arrays
                hold, NaN included.

        Raises:
            ConfigurationError: The arrays are not those that the buffer was made for.
        """
        if len(arrays) != len(self.views):
            raise ConfigurationError(f"arrays: expected {len(self.views)}. Received: {len(arrays)}.")
        scales = scale if isinstance(scale, Sequence) else [scale] * len(arrays)
        with np.errstate(over="ignore", invalid="ignore"):
            for index, (array, view, dtype, own) in enumerate(
                zip(arrays, self.views, self._dtypes, scales, strict=True)
            ):
                if array.shape != view.shape or array.dtype != dtype:
                    raise ConfigurationError(
                        f"arrays[{index}]: expected {dtype} of shape {view.shape}. "
                        f"Received: {array.dtype} of shape {array.shape}."
                    )
                _write_scaled(array, own, view)

    def allreduce(self, communicator: Communicator, reduce_float32: Callable[[np.ndarray], None] | None = None) -> None:
        """Sums the buffers over all ranks, in place; raises what ``Communicator.allreduce_`` raises.

        Args:
            communicator: Connects the ranks.
            reduce_float32: Sums the float32 buffer in place in another way, such as compressed.
        """
        for dtype, buffer in self._buffers.items():
            if dtype == _FLOAT32 and reduce_float32 is not None:
                reduce_float32(buffer)
            else:
                communicator.allreduce_(buffer)

    def unpack(self) -> list[np.ndarray]:
        """Returns the arrays in the order, shapes and dtypes of the specs.

        They are views that the next ``pack`` overwrites, except for 16-bit floats, which are cast.
        """
        return [view.astype(dtype, copy=False) for view, dtype in zip(self.views, self._dtypes, strict=True)]


def _reduced_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which an array is summed."""
    check_reduction(dtype, "sum")
    return _FLOAT32 if is_half(dtype) else dtype


def _aligned(count: int, dtype: np.dtype) -> int:
    """Returns the least number of elements from ``count`` on after which another array may begin."""
    step = ALIGNMENT // dtype.itemsize
    return -(-count // step) * step


def _write_scaled(array: np.ndarray, scale: float, view: np.ndarray) -> None:
    if scale == 0.0:
        view[...] = 0
    elif view.dtype.kind == "i":
        if scale != int(scale):
            raise ConfigurationError(f"scale: expected a whole number for {view.dtype}. Received: {scale!r}.")
        np.multiply(array, view.dtype.type(int(scale)), out=view)
    else:
        np.multiply(array, view.dtype.type(scale), out=view, dtype=view.dtype, casting="unsafe")
