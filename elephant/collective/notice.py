"""What ranks tell each other besides data: that they leave, that they failed, that they still wait.

::

    offset  bytes  field (integers are little-endian)
         0      4  magic, b"ENOT"
         4      2  kind
         6      2  length of the text
         8      8  number of an operation
        16         text, UTF-8
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from elephant.errors import AuthenticationError, DeadlineExceededError, NetworkError, PeerLostError, ProtocolError

_HEAD = struct.Struct("<4sHHQ")
_MAGIC = b"ENOT"
_MAX_TEXT_BYTES = 4000


class Kind(enum.IntEnum):
    """What a notice says; those of a failure are named for the error that all ranks raise."""

    CLOSED = 0  # leaves in good order
    WAITING = 1  # asks which operation the others are in
    PRESENT = 2  # answers; the text says for how many seconds
    LOST = 3
    PROTOCOL = 4
    DEADLINE = 5
    AUTHENTICATION = 6
    NETWORK = 7


_ERRORS: dict[Kind, type[NetworkError]] = {
    Kind.LOST: PeerLostError,
    Kind.PROTOCOL: ProtocolError,
    Kind.DEADLINE: DeadlineExceededError,
    Kind.AUTHENTICATION: AuthenticationError,
    Kind.NETWORK: NetworkError,
}


@dataclass(frozen=True)
class Notice:
    """One notice.

    Args:
        kind: What it says.
        sequence: Of one who leaves, the last operation that it finished; else the one that it is in.
        text: The error's message, or empty.
    """

    kind: Kind
    sequence: int
    text: str = ""

    @classmethod
    def of(cls, error: NetworkError, sequence: int) -> Notice:
        """Returns the notice that makes other ranks raise the same error."""
        kind = next(kind for kind, error_class in _ERRORS.items() if isinstance(error, error_class))
        return cls(kind, sequence, str(error))

    @property
    def error(self) -> NetworkError | None:
        """The error to raise, or None when it tells of no failure."""
        return _ERRORS[self.kind](self.text) if self.kind in _ERRORS else None

    def to_bytes(self) -> bytes:
        """Returns the fixed head and the text, which is cut after 4000 bytes."""
        text = self.text.encode("utf-8")[:_MAX_TEXT_BYTES]
        return _HEAD.pack(_MAGIC, self.kind, len(text), self.sequence) + text


def take_notice(received: bytearray) -> Notice | None:
    """Removes one whole notice from the start of what was received, and returns it; None where none is whole.

    Raises:
        ProtocolError: What was received is no notice.
    """
    if len(received) < _HEAD.size:
        return None
    magic, kind, length, sequence = _HEAD.unpack_from(received)
    if magic != _MAGIC or kind not in list(Kind) or length > _MAX_TEXT_BYTES:
        raise ProtocolError(f"Expected a notice. Received: {bytes(received[: _HEAD.size])!r}.")
    end = _HEAD.size + length
    if len(received) < end:
        return None
    text = received[_HEAD.size : end].decode("utf-8", "replace")
    del received[:end]
    return Notice(Kind(kind), sequence, text)
