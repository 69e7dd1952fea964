"""Error feedback: what an encoding loses is added to the next one, so that nothing is lost for good."""

from __future__ import annotations

import numpy as np

from elephant.compression.base import Codec
from elephant.errors import ConfigurationError


class ErrorFeedback(Codec):
    """Encodes with another codec, and keeps for each index what that lost until the next operation.

    Over many operations the sum of what others decode then differs from the sum of what was
    given by one loss only, whatever the codec rounds away each time (Seide et al. 2014,
    section 3; Karimireddy et al. 2019, algorithm 1).

    Where a decoded value is not finite, the memory stays as it was.

    Args:
        codec: The codec; it belongs to this one from here on.
        count: Length of the whole array. The memory, one float32 for each value, is taken as it is used.
    """

    def __init__(self, codec: Codec, count: int) -> None:
        self._codec = codec
        self._memory = np.zeros(count, np.float32)
        self._wanted = np.empty(0, np.float32)
        self._decoded = np.empty(0, np.float32)

    def encoded_bytes(self, count: int) -> int:
        return self._codec.encoded_bytes(count)

    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        count = len(values)
        if not 0 <= offset <= len(self._memory) - count:
            raise ConfigurationError(
                f"offset: expected pieces of an array of {len(self._memory)} values. "
                f"Received: {count} values from {offset} on. Make the codec for the length of the whole array."
            )
        self._grow(count)
        memory, wanted, decoded = self._memory[offset : offset + count], self._wanted[:count], self._decoded[:count]
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(values, memory, out=wanted)
            self._codec.encode(wanted, out, offset=offset)
            self._codec.decode(out, decoded)
            finite = np.isfinite(decoded)
            np.subtract(wanted, decoded, out=memory, where=True if finite.all() else finite)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        self._codec.decode(data, out)

    def _grow(self, count: int) -> None:
        if count > len(self._wanted):
            self._wanted, self._decoded = np.empty((2, count), np.float32)
