"""What the pieces of an array look like on their way round the ring: as they are, or encoded by a codec.

A piece is a range of indices of the flat array. It leaves as a partial result, to be
added to by the next rank, or as a final one, to be copied by all others.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from elephant.collective.reduce_ops import ReduceOp
from elephant.compression import Codec
from elephant.net.frames import raw_view

Piece = tuple[int, int]


class ChunkCodec(ABC):
    """Packs and unpacks pieces of one array."""

    @abstractmethod
    def box(self, piece: Piece) -> memoryview:
        """Returns the bytes of a piece that leaves, or that comes in as a final result."""

    @abstractmethod
    def inbox(self, piece: Piece) -> memoryview:
        """Returns where a partial result comes in; the next one comes to the same place."""

    @abstractmethod
    def pack(self, piece: Piece, *, final: bool) -> None:
        """Makes the bytes of a piece that this rank has reduced."""

    @abstractmethod
    def add(self, piece: Piece, *, final: bool) -> None:
        """Reduces what came into the inbox with this rank's values; ``final`` when all ranks' are in it then."""

    @abstractmethod
    def unpack(self, piece: Piece) -> None:
        """Takes over the final result that came into the box."""


class PlainChunks(ChunkCodec):
    """Pieces as they are: they leave from the array, and come into it.

    Args:
        flat: The array, of one dimension; reduced in place.
        reduction: How.
        scratch: Uint8, as long as the longest piece.
    """

    def __init__(self, flat: np.ndarray, reduction: ReduceOp, scratch: np.ndarray) -> None:
        self._flat = flat
        self._raw = raw_view(flat)
        self._reduction = reduction
        self._inbox = scratch.view(flat.dtype)

    def box(self, piece: Piece) -> memoryview:
        size = self._flat.itemsize
        return self._raw[piece[0] * size : piece[1] * size]

    def inbox(self, piece: Piece) -> memoryview:
        return raw_view(self._inbox[: piece[1] - piece[0]])

    def pack(self, piece: Piece, *, final: bool) -> None:
        pass

    def add(self, piece: Piece, *, final: bool) -> None:
        values = self._flat[piece[0] : piece[1]]
        self._reduction.combine(values, self._inbox[: len(values)], values)
        if final:
            self._reduction.finish(values)

    def unpack(self, piece: Piece) -> None:
        pass


class EncodedChunks(ChunkCodec):
    """Pieces as a codec makes them.

    The rank that completes a piece encodes it once and takes over its own encoding; the others
    pass the bytes on unchanged. So all ranks hold the same bits.

    Args:
        flat: Float32, of one dimension; reduced in place.
        reduction: A sum or a mean.
        codec: Used by one thread that packs, and another that adds and unpacks.
        pieces: All pieces of the array.
        scratch: Where the encoded pieces are kept from one operation to the next.
    """

    def __init__(
        self,
        flat: np.ndarray,
        reduction: ReduceOp,
        codec: Codec,
        pieces: Iterable[Piece],
        scratch: EncodedScratch,
    ) -> None:
        self._flat = flat
        self._reduction = reduction
        self._codec = codec
        self._bytes = {piece: codec.encoded_bytes(piece[1] - piece[0]) for piece in pieces}
        self._starts: dict[Piece, int] = {}
        total = 0
        for piece, length in self._bytes.items():
            self._starts[piece] = total
            total += length
        self._boxes = scratch.boxes(total)
        self._inbox = scratch.inbox(max(self._bytes.values(), default=0))
        self._decoded = scratch.decoded(max((stop - start for start, stop in self._bytes), default=0))
        # The thread that packs decodes too, where it takes over its own encoding.
        self._decoding = threading.Lock()

    def box(self, piece: Piece) -> memoryview:
        return self._boxed(piece).data

    def inbox(self, piece: Piece) -> memoryview:
        return self._inbox[: self._bytes[piece]].data

    def pack(self, piece: Piece, *, final: bool) -> None:
        start, stop = piece
        self._codec.encode(self._flat[start:stop], self._boxed(piece), offset=start)
        if final:
            self.unpack(piece)

    def add(self, piece: Piece, *, final: bool) -> None:
        values = self._flat[piece[0] : piece[1]]
        arrived = self._decoded[: len(values)]
        with self._decoding:
            self._codec.decode(self._inbox[: self._bytes[piece]], arrived)
        self._reduction.combine(values, arrived, values)
        if final:
            self._reduction.finish(values)

    def unpack(self, piece: Piece) -> None:
        with self._decoding:
            self._codec.decode(self._boxed(piece), self._flat[piece[0] : piece[1]])

    def _boxed(self, piece: Piece) -> np.ndarray:
        start = self._starts[piece]
        return self._boxes[start : start + self._bytes[piece]]


class EncodedScratch:
    """Memory for encoded pieces, which grows to what the largest array takes and is then kept."""

    def __init__(self) -> None:
        self._boxes = np.empty(0, np.uint8)
        self._inbox = np.empty(0, np.uint8)
        self._decoded = np.empty(0, np.float32)

    def boxes(self, length: int) -> np.ndarray:
        """Returns uint8 of at least this length, for all pieces of an array."""
        if len(self._boxes) < length:
            self._boxes = np.empty(length, np.uint8)
        return self._boxes

    def inbox(self, length: int) -> np.ndarray:
        """Returns uint8 of at least this length, for one piece."""
        if len(self._inbox) < length:
            self._inbox = np.empty(length, np.uint8)
        return self._inbox

    def decoded(self, count: int) -> np.ndarray:
        """Returns float32 of at least this many values, for one piece."""
        if len(self._decoded) < count:
            self._decoded = np.empty(count, np.float32)
        return self._decoded
