"""The largest gradients now, the others once they have grown: top-k sparsification with error feedback."""

from __future__ import annotations

import functools
import math

import numpy as np

from elephant.compression.codec import Compression, Exchange, GradientReducer, Slices, blocks, register_reducer

DEFAULT_RATIO = 0.01
_SAMPLE_VALUES = 1 << 16
# Indices travel as 16 bits and how many there are in each range of that length.
_INDEX_BITS = 16
_COUNT_BYTES, _VALUE_BYTES = 4, 4
# Bytes of each value that is sent, its index included.
_BYTES_PER_VALUE = 6
_SMALLEST = np.float32(1e-45)


class TopK(GradientReducer):
    """Sums the gradients of largest magnitude, and keeps all others for the steps to come.

    Each rank adds the gradient to what it kept, sends the ``ratio`` of largest magnitude and
    keeps the rest (Aji & Heafield 2017, section 3). All ranks gather what all have sent, 6
    bytes for each value, and add it up in the order of the ranks. Which are the largest is
    decided over all arrays together: a threshold is estimated from a sample (Lin et al. 2018,
    section 5), and the selection is exact among those that pass it.

    Gradients that are not finite are always among those sent.

    Args:
        ratio: Share of the values that each rank sends in each step, in (0, 1].
    """

    def __init__(self, slices: Slices, *, ratio: float = DEFAULT_RATIO) -> None:
        super().__init__(slices)
        self._keep = math.ceil(ratio * self._count)
        self._memory = np.zeros(self._count, np.float32)
        # How many steps there have been.
        self._step = np.zeros(1, np.int64)

    @property
    def memory(self) -> list[np.ndarray]:
        return [self._memory, self._step]

    def _reduce(self, flat: np.ndarray, exchange: Exchange) -> None:
        gradient = flat[: self._count]
        indices, values = self._take_largest(gradient)
        parts = exchange.allgather(pack_sparse(indices, values, self._count))
        gradient.fill(0)
        for part in parts:
            others, theirs = unpack_sparse(part, self._count)
            gradient[others] += theirs
        self._reduce_rest(flat, exchange)

    def _take_largest(self, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds the gradient to the memory, and takes the largest values out of it."""
        indices = self._candidates(gradient, self._threshold(gradient))
        values = self._memory[indices]
        surplus = len(indices) - self._keep
        if surplus > 0:
            # NaN counts as larger than all numbers.
            largest = np.argpartition(np.abs(values), surplus)[surplus:]
            largest.sort()
            indices, values = indices[largest], values[largest]
        self._memory[indices] = 0
        if not np.isfinite(values).all():
            self._memory[~np.isfinite(self._memory)] = 0
        return indices, values

    def _threshold(self, gradient: np.ndarray) -> np.float32:
        """Returns a magnitude that somewhat more values than are to be sent reach, as a sample has it.

        Values of zero are never worth sending.
        """
        stride = max(1, self._count // _SAMPLE_VALUES) | 1
        start = int(self._step[0]) % stride
        self._step += 1
        sample = np.abs(gradient[start::stride] + self._memory[start::stride])
        sample = sample[np.isfinite(sample)]
        expected = self._keep * len(sample) / max(self._count, 1)
        wanted = math.ceil(expected + 3 * math.sqrt(expected))
        if wanted >= len(sample):
            return _SMALLEST
        return np.maximum(np.partition(sample, len(sample) - wanted)[len(sample) - wanted], _SMALLEST)

    def _candidates(self, gradient: np.ndarray, threshold: np.float32) -> np.ndarray:
        """Adds the gradient to the memory, and returns the indices of what is then not below the threshold."""
        found = [np.empty(0, np.int64)]
        for block in blocks(self._count):
            memory = self._memory[block]
            np.add(memory, gradient[block], out=memory)
            # Not "at least", which NaN would not be.
            found.append(np.flatnonzero(~(np.abs(memory) < threshold)) + block.start)
        return np.concatenate(found)


def pack_sparse(indices: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Returns some of an array's values as bytes.

    Args:
        indices: Int64 of shape (kept,), ascending, each once.
        values: Float32 of shape (kept,).

    Returns:
        Uint8: how many values each range of 65,536 indices has, as uint32; the values; the lower 16
        bits of their indices.
    """
    counts = np.bincount(indices >> _INDEX_BITS, minlength=_num_ranges(count)).astype(np.uint32)
    lower = indices.astype(np.uint16)
    return np.concatenate([counts.view(np.uint8), values.view(np.uint8), lower.view(np.uint8)])


def unpack_sparse(data: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices and the values that ``pack_sparse`` made the bytes of.

    >>> indices, values = np.array([3, 70_000]), np.array([0.5, -2.0], np.float32)
    >>> [part.tolist() for part in unpack_sparse(pack_sparse(indices, values, 100_000), 100_000)]
    [[3, 70000], [0.5, -2.0]]
    """
    ranges = _num_ranges(count)
    counts = data[: _COUNT_BYTES * ranges].view(np.uint32)
    begin = _COUNT_BYTES * ranges
    border = begin + _VALUE_BYTES * int(counts.sum())
    upper = np.repeat(np.arange(ranges, dtype=np.int64) << _INDEX_BITS, counts)
    return upper + data[border:].view(np.uint16), data[begin:border].view(np.float32)


def _num_ranges(count: int) -> int:
    return -(-count // (1 << _INDEX_BITS))


def _described(name: str, option: str | None) -> Compression:
    share = DEFAULT_RATIO if option is None else float(option)
    if not 0 < share <= 1:
        raise ValueError(share)
    ratio = _VALUE_BYTES / (_BYTES_PER_VALUE * share)
    return Compression(name=name, ratio=ratio, reduction=functools.partial(TopK, ratio=share))


register_reducer("topk", _described)
