"""A quarter of the bytes: float32 values as 8-bit integers with a scale for every chunk of them."""

from __future__ import annotations

import numpy as np

from elephant.compression.codec import BLOCK_VALUES, Codec, blocks

CHUNK_VALUES = 1024
SCALE_BYTES = 4
# A little more than 127, so that 127 steps of the largest finite scale are finite.
_STEPS = np.nextafter(np.float32(127), np.float32(128))
# The smallest scale whose reciprocal is finite: chunks of zeros, and of less than 1.5e-36, have it.
_MIN_SCALE = np.float32(2.0**-126)


class Int8(Codec):
    """Integers from -127 to 127 times one float32 scale for every 1,024 values.

    A chunk's scale is its largest magnitude over 127, so that a value is off by half a
    step at most. A chunk with a NaN or an infinity comes out without a finite value: a
    gradient that overflowed must not look like one that did not.

    The scales come first, then the integers.
    """

    def __init__(self) -> None:
        self._scratch = np.empty(BLOCK_VALUES, np.float32)
        self._inverse = np.empty((BLOCK_VALUES // CHUNK_VALUES, 1), np.float32)

    def encoded_bytes(self, count: int) -> int:
        return SCALE_BYTES * _num_chunks(count) + count

    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        self._encode(values, out, None)

    def encode_keeping(self, values: np.ndarray, out: np.ndarray, lost: np.ndarray, *, offset: int) -> None:
        self._encode(values, out, lost)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        scales, codes = _parts(data, len(out))
        # Zero steps of an infinite scale.
        with np.errstate(invalid="ignore", over="ignore"):
            for block in blocks(len(out)):
                for chunks in _whole_and_rest(block):
                    own = scales[_scales_of(chunks)]
                    values = out[chunks].reshape(len(own), -1)
                    np.copyto(values, codes[chunks].reshape(len(own), -1))
                    np.multiply(values, own, out=values)

    def _encode(self, values: np.ndarray, out: np.ndarray, lost: np.ndarray | None) -> None:
        scales, codes = _parts(out, len(values))
        with np.errstate(all="ignore"):
            for block in blocks(len(values)):
                for chunks in _whole_and_rest(block):
                    own = scales[_scales_of(chunks)]
                    steps = self._encode_chunks(values[chunks], own, codes[chunks])
                    if lost is not None:
                        # The very product that decoding makes.
                        np.multiply(steps, own, out=steps)
                        np.subtract(values[chunks], steps.reshape(-1), out=lost[chunks])

    def _encode_chunks(self, values: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Writes scales and integers, and returns the integers as float32, in memory that the next call overwrites."""
        rows = len(scales)
        scratch, inverse = self._scratch[: len(values)].reshape(rows, -1), self._inverse[:rows]
        np.abs(values.reshape(rows, -1), out=scratch)
        np.maximum.reduce(scratch, axis=1, out=scales, keepdims=True)
        np.divide(scales, _STEPS, out=scales)
        np.maximum(scales, _MIN_SCALE, out=scales)
        np.reciprocal(scales, out=inverse)
        np.multiply(values.reshape(rows, -1), inverse, out=scratch)
        np.rint(scratch, out=scratch)
        np.copyto(codes.reshape(rows, -1), scratch, casting="unsafe")
        return scratch


def _num_chunks(count: int) -> int:
    return -(-count // CHUNK_VALUES)


def _parts(data: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales, of shape (chunks, 1), and the integers, of shape (count,), as views."""
    border = SCALE_BYTES * _num_chunks(count)
    return data[:border].view(np.float32).reshape(-1, 1), data[border:].view(np.int8)


def _whole_and_rest(block: slice) -> list[slice]:
    """Cuts off the last chunk where it is shorter than the others, because a matrix cannot hold it."""
    border = block.stop - (block.stop - block.start) % CHUNK_VALUES
    return [part for part in (slice(block.start, border), slice(border, block.stop)) if part.start < part.stop]


def _scales_of(chunks: slice) -> slice:
    return slice(chunks.start // CHUNK_VALUES, _num_chunks(chunks.stop))
