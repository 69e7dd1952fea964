"""Codecs that lower the precision: bfloat16, float16, and int8 with a scale for each block.

Values are rounded to the nearest, ties to even. What does not fit becomes infinite, and NaN stays NaN: loss
scaling has to see both.
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

from elephant.compression.codec import BLOCK_VALUES, Codec, ErrorFeedback, blocks, register_codec

_FLOAT32_EXPONENT = np.uint32(0x7F800000)
_FLOAT16_SIGN = np.uint16(0x8000)
_FLOAT16_MIN_NORMAL = np.float32(2.0**-14)
_FLOAT16_BEYOND = np.float32(2.0**16)
# Float16 has 10 bits behind the point and float32 has 23: a sum with a power of two that is 13 binades up
# has its last bit where float16 has it.
_BINADES = np.uint32(13)
# What the exponent field of a float32, 13 binades up, exceeds that of a float16, less the leading one
# that the sum's last bits hold besides the fraction.
_FLOAT16_BIAS = np.uint16(((127 - 15 + 13 + 1) << 10) & 0xFFFF)

CHUNK_VALUES = 1024
SCALE_BYTES = 4
# A little more than 127, so that 127 steps of the largest finite scale are finite.
_STEPS = np.nextafter(np.float32(127), np.float32(128))
# The smallest scale whose reciprocal is finite: chunks of zeros, and of less than 1.5e-36, have it.
_MIN_SCALE = np.float32(2.0**-126)


class BFloat16(Codec):
    """The upper half of a float32: its whole range, with 8 significant bits."""

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        # The cast of a NaN may raise the flag of an invalid operation.
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out.view(bfloat16), values, casting="unsafe")

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, data.view(bfloat16), casting="unsafe")


class Float16(Codec):
    """IEEE half precision: 11 significant bits from 6.1e-5 to 65,504, fewer down to 6e-8.

    numpy's own casts go value by value. Here the rounding is done by an addition: a float32
    plus a power of two 13 binades above it has its last bit where the float16 has its own
    (the idea of the FP16 library of M. Dukhan). Decoding looks up a table.
    """

    def __init__(self) -> None:
        self._magnitude = np.empty(BLOCK_VALUES, np.float32)
        self._binade = np.empty(BLOCK_VALUES, np.float32)
        self._sign = np.empty(BLOCK_VALUES, np.uint16)
        self._table = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        encoded = out.view(np.uint16)
        for block in blocks(len(values)):
            self._encode_block(values[block], encoded[block])

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        encoded = data.view(np.uint16)
        for block in blocks(len(out)):
            np.take(self._table, encoded[block], out=out[block], mode="clip")

    def _encode_block(self, values: np.ndarray, encoded: np.ndarray) -> None:
        count = len(values)
        magnitude, binade, sign = self._magnitude[:count], self._binade[:count], self._sign[:count]
        np.abs(values, out=magnitude)
        # NaN is not below anything.
        if not magnitude.max() < _FLOAT16_BEYOND:
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(encoded.view(np.float16), values, casting="unsafe")
            return
        bits = binade.view(np.uint32)
        np.maximum(magnitude, _FLOAT16_MIN_NORMAL, out=binade)
        np.bitwise_and(bits, _FLOAT32_EXPONENT, out=bits)
        np.add(bits, _BINADES << np.uint32(23), out=bits)
        np.add(magnitude, binade, out=magnitude)
        np.right_shift(bits, 13, out=bits)
        np.add(bits, magnitude.view(np.uint32), out=bits)
        # Only the last 16 bits count: the sum's own exponent is above them.
        np.copyto(encoded, bits, casting="unsafe")
        np.subtract(encoded, _FLOAT16_BIAS, out=encoded)
        np.right_shift(values.view(np.uint32), 16, out=bits)
        np.copyto(sign, bits, casting="unsafe")
        np.bitwise_and(sign, _FLOAT16_SIGN, out=sign)
        np.bitwise_or(encoded, sign, out=encoded)


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


# What is greater in size may be rounded to infinity.
register_codec("bfloat16", lambda count: BFloat16(), ratio=2.0, finite_limit=3.389e38)
register_codec("float16", lambda count: Float16(), ratio=2.0, finite_limit=65504.0)
# Weights that are pulled are no differences: 8 bits with a scale would move them more than training does.
_INT8_RATIO = 4 * CHUNK_VALUES / (SCALE_BYTES + CHUNK_VALUES)
register_codec("int8", lambda count: Int8(), ratio=_INT8_RATIO, pull=BFloat16)
register_codec("int8:feedback", lambda count: ErrorFeedback(Int8(), count), ratio=_INT8_RATIO, pull=BFloat16)
