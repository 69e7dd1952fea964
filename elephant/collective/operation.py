"""One collective operation: its header, its deadline, and the sizes that choose its algorithm."""

from __future__ import annotations

import struct
import time
import zlib
from dataclasses import dataclass

from elephant.errors import ProtocolError
from elephant.net.deadline import Deadline

_REQUEST = struct.Struct("<4s4xQ64s")
_MAGIC = b"EREQ"
_NAME_BYTES = 64
REQUEST_BYTES = _REQUEST.size


class Operation:
    """What this rank asks for, and until when.

    Args:
        sequence: The number of the operation, from one; zero while the ranks connect.
        name: Operation, dtype and size in words; all ranks must say the same.
        deadline: When it must be over.

    Attributes:
        request: Number and name in a fixed number of bytes, the same on every rank.
    """

    def __init__(self, sequence: int, name: str, deadline: Deadline) -> None:
        self.sequence = sequence
        self.name = name
        self.deadline = deadline
        self.request = _REQUEST.pack(_MAGIC, sequence, _fixed_length(name))
        self._began = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since this rank entered the operation."""
        return time.monotonic() - self._began

    def check(self, request: bytes | memoryview, rank: int, other: int) -> None:
        """Compares the request of another rank with this one.

        Args:
            request: The other rank's ``request``.
            rank: This rank.
            other: The rank that it came from.

        Raises:
            ProtocolError: The other rank asked for something else.
        """
        if request == self.request:
            return
        magic, sequence, name = _REQUEST.unpack(request)
        if magic != _MAGIC:
            raise ProtocolError(f"Expected a request of rank {other}. Received: {bytes(request[:8])!r}.")
        shown = name.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise ProtocolError(
            "Expected all ranks to call the same operations in the same order, with the same shapes and dtypes. "
            f"Received: rank {other} asked for {shown!r} as operation {sequence}, "
            f"rank {rank} for {self.name!r} as operation {self.sequence}."
        )


def _fixed_length(name: str) -> bytes:
    """Returns the name in 64 bytes; a longer one keeps its start, and the checksum of the whole as its end."""
    data = name.encode("ascii", "backslashreplace")
    if len(data) > _NAME_BYTES:
        data = data[: _NAME_BYTES - 9] + b"~%08x" % zlib.crc32(data)
    return data.ljust(_NAME_BYTES, b"\0")


@dataclass(frozen=True, kw_only=True)
class AlgorithmThresholds:
    """The limits between the ways that an array can go, in bytes, as measured.

    Args:
        small_bytes: Arrays that make no more than this over all ranks are gathered whole on every rank.
        piece_bytes: Length of the pieces in which larger ones go round a ring; a multiple of eight.
        threaded_bytes: Of arrays of this length, a second thread sends the pieces.
        block_bytes: Length of each rank's blocks in shared memory; a multiple of eight.
        staged_bytes: Length of the float32 blocks in which 16-bit floats are reduced; a multiple of eight.
    """

    small_bytes: int = 1 << 18
    piece_bytes: int = 1 << 19
    threaded_bytes: int = 1 << 23
    block_bytes: int = 1 << 20
    staged_bytes: int = 1 << 22
