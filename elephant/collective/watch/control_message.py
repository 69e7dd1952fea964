"""Control messages: the notices that ranks send each other over the connections on which no data travels.

::

    offset  bytes  field (integers are little-endian)
         0      4  magic, b"ENOT"
         4      2  kind
         6      2  length of the text
         8      4  rank that it tells of; -1 where that is the sender
        12      8  number of an operation, its group's in the upper 16 bits
        20         text, UTF-8
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from elephant.errors import AuthenticationError, DeadlineExceededError, NetworkError, PeerLostError, ProtocolError

_HEAD = struct.Struct("<4sHHiQ")
_MAGIC = b"ENOT"
_MAX_TEXT_BYTES = 4000
SENDER = -1


class ControlKind(enum.IntEnum):
    """Kinds of notices; those of a failure are named for the error that all ranks raise."""

    CLOSED = 0  # leaves in good order
    WAITING = 1  # asks which operation the others are in
    PRESENT = 2  # answers; the text says for how many seconds
    LOST = 3
    PROTOCOL = 4
    DEADLINE = 5
    AUTHENTICATION = 6
    NETWORK = 7
    HOST = 8  # is there; the text is its host key
    DIED = 9  # its connection has ended without a word; the text is the rank that it was connected with


_ERRORS: dict[ControlKind, type[NetworkError]] = {
    ControlKind.LOST: PeerLostError,
    ControlKind.PROTOCOL: ProtocolError,
    ControlKind.DEADLINE: DeadlineExceededError,
    ControlKind.AUTHENTICATION: AuthenticationError,
    ControlKind.NETWORK: NetworkError,
}


@dataclass(frozen=True)
class ControlMessage:
    """One notice.

    Args:
        kind: What it says.
        sequence: Of one who leaves, the last operation that it finished; else the one that it is in.
        text: The error's message, or what the kind says.
        rank: Of whom it tells.
    """

    kind: ControlKind
    sequence: int
    text: str = ""
    rank: int = SENDER

    @classmethod
    def of(cls, error: NetworkError, sequence: int) -> ControlMessage:
        """Returns the notice that makes other ranks raise the same error."""
        kind = next(kind for kind, error_class in _ERRORS.items() if isinstance(error, error_class))
        return cls(kind, sequence, str(error))

    @property
    def tells_of_failure(self) -> bool:
        """True if there is an error to raise."""
        return self.kind in _ERRORS

    @property
    def error(self) -> NetworkError | None:
        """The error to raise, or None when it tells of no failure."""
        return _ERRORS[self.kind](self.text) if self.tells_of_failure else None

    def to_bytes(self) -> bytes:
        """Returns the fixed head and the text, which is cut after 4000 bytes."""
        text = self.text.encode("utf-8")[:_MAX_TEXT_BYTES]
        return _HEAD.pack(_MAGIC, self.kind, len(text), self.rank, self.sequence) + text


def take_notice(received: bytearray) -> ControlMessage | None:
    """Removes one whole notice from the start of what was received, and returns it; None where none is whole.

    Raises:
        ProtocolError: What was received is no notice.
    """
    if len(received) < _HEAD.size:
        return None
    magic, kind, length, rank, sequence = _HEAD.unpack_from(received)
    if magic != _MAGIC or kind not in _KINDS or length > _MAX_TEXT_BYTES:
        raise ProtocolError(f"Expected a notice. Received: {bytes(received[: _HEAD.size])!r}.")
    end = _HEAD.size + length
    if len(received) < end:
        return None
    text = received[_HEAD.size : end].decode("utf-8", "replace")
    del received[:end]
    return ControlMessage(ControlKind(kind), sequence, text, rank)


_KINDS = frozenset(map(int, ControlKind))
