"""What every way of encoding float32 values in fewer bytes offers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class Codec(ABC):
    """Encodes pieces of a flat float32 array, of any length, each for itself.

    A codec may keep scratch memory for encoding, so that it allocates nothing in the steady state.
    One thread may encode while others decode: decoding keeps nothing.
    """

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Returns how many bytes ``count`` values take, whatever they are."""

    @abstractmethod
    def encode(self, values: np.ndarray, out: np.ndarray, *, offset: int) -> None:
        """Writes the encoded values.

        Args:
            values: Float32 of shape (count,), not changed.
            out: Uint8 of shape (``encoded_bytes(count)``,).
            offset: Index of the first value in the whole array that the piece belongs to. In one
                operation, each index is encoded at most once by each rank.
        """

    @abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Writes the values that were encoded.

        Args:
            data: Uint8 of shape (``encoded_bytes(count)``,), not changed.
            out: Float32 of shape (count,).
        """

    def encode_keeping(self, values: np.ndarray, out: np.ndarray, lost: np.ndarray, *, offset: int) -> None:
        """Encodes as ``encode`` does, and writes what ``decode`` will be short of.

        Args:
            values: As for ``encode``.
            out: As for ``encode``.
            lost: Float32 of shape (count,): gets ``values`` less what ``decode`` makes of ``out``.
            offset: As for ``encode``.
        """
        self.encode(values, out, offset=offset)
        self.decode(out, lost)
        np.subtract(values, lost, out=lost)
