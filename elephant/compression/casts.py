"""Half the bytes: float32 values rounded to a float of 16 bits.

Values are rounded to the nearest, ties to even. What does not fit becomes infinite, and NaN stays NaN: loss
scaling has to see both.
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

from elephant.compression.codec import BLOCK_VALUES, Codec, blocks

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
