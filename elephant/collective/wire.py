"""What ranks say to each other besides data: the request that opens an operation, and the notice that ends all.

A request travels to the right with the first data of an operation. A notice travels
to the left, against the data, on connections that carry nothing else in that
direction; so it finds every rank, whatever that rank is in the middle of.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError, ProtocolError

_REQUEST = struct.Struct("<4sIQ64s")
_REQUEST_MAGIC = b"EREQ"
_NAME_BYTES = 64
REQUEST_BYTES = _REQUEST.size

_NOTICE = struct.Struct("<4sHHQ")
_NOTICE_MAGIC = b"ENOT"
_MAX_TEXT_BYTES = 4000
NOTICE_BYTES = _NOTICE.size

_FAREWELL = 0
_KINDS: dict[int, type[NetworkError]] = {1: PeerLostError, 2: ProtocolError, 3: DeadlineExceededError, 4: NetworkError}


@dataclass(frozen=True)
class Request:
    """The operation that a rank has entered.

    Args:
        sequence: Its number, from one.
        name: Operation, dtype and size in words; all ranks must say the same.
        rank: Who asks.
    """

    sequence: int
    name: str
    rank: int

    def to_bytes(self) -> bytes:
        """Returns the fixed number of bytes that open the operation."""
        return _REQUEST.pack(_REQUEST_MAGIC, self.rank, self.sequence, _fixed_length(self.name))

    def check(self, data: memoryview, left: int) -> None:
        """Compares the left neighbour's request with this one.

        Raises:
            ProtocolError: It asked for something else.
        """
        magic, rank, sequence, name = _REQUEST.unpack(data)
        if magic != _REQUEST_MAGIC or rank != left:
            raise ProtocolError(f"Expected a request of rank {left}. Received: {bytes(data[:8])!r}.")
        if (sequence, name) != (self.sequence, _fixed_length(self.name)):
            shown = name.rstrip(b"\0").decode("ascii", "backslashreplace")
            raise ProtocolError(
                "Expected all ranks to call the same operations in the same order. "
                f"Received: rank {left} asked for {shown!r} as operation {sequence}, "
                f"rank {self.rank} for {self.name!r} as operation {self.sequence}."
            )


@dataclass(frozen=True)
class Notice:
    """What a rank says before it leaves.

    Args:
        error: Why it leaves, or None when it has come to the end in good order.
        finished: Number of the last operation that it finished.
    """

    error: NetworkError | None
    finished: int

    def to_bytes(self) -> bytes:
        """Returns the fixed head and the text."""
        if self.error is None:
            return _NOTICE.pack(_NOTICE_MAGIC, _FAREWELL, 0, self.finished)
        code = next(code for code, kind in _KINDS.items() if isinstance(self.error, kind))
        text = str(self.error).encode("utf-8")[:_MAX_TEXT_BYTES]
        return _NOTICE.pack(_NOTICE_MAGIC, code, len(text), self.finished) + text


def text_bytes_of(head: bytes) -> int:
    """Returns how many bytes of text follow the head of a notice.

    Raises:
        ProtocolError: It is no notice.
    """
    magic, code, length, _ = _NOTICE.unpack(head)
    if magic != _NOTICE_MAGIC or (code != _FAREWELL and code not in _KINDS) or length > _MAX_TEXT_BYTES:
        raise ProtocolError(f"Expected a notice. Received: {head!r}.")
    return int(length)


def decode_notice(head: bytes, text: bytes) -> Notice:
    """Returns the notice with this head, which ``text_bytes_of`` has checked, and this text."""
    _, code, _, finished = _NOTICE.unpack(head)
    return Notice(None if code == _FAREWELL else _KINDS[code](text.decode("utf-8", "replace")), finished)


def _fixed_length(name: str) -> bytes:
    """Returns the name in 64 bytes; a longer one keeps its start, and the checksum of the whole as its end."""
    data = name.encode("ascii", "backslashreplace")
    if len(data) > _NAME_BYTES:
        data = data[: _NAME_BYTES - 9] + b"~%08x" % zlib.crc32(data)
    return data.ljust(_NAME_BYTES, b"\0")
