"""Failure detection: control messages between ranks, and the thread that watches for them.

A rank that dies is seen by all others at once, as the end of its own connection. One
that fails tells all others why before it leaves, so that they name the cause and not
the messenger. When a deadline passes, a rank asks who is there, and names those that do
not answer. All connections are in one selector, whose descriptor the loops that move
data poll next to their own sockets: while nothing happens, watching costs nothing.

::

    offset  bytes  field (integers are little-endian)
         0      4  magic, b"ENOT"
         4      2  kind
         6      2  length of the text
         8      8  number of an operation
        16         text, UTF-8
"""

from __future__ import annotations

import contextlib
import enum
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from elephant.collective.operation import Operation
from elephant.errors import AuthenticationError, DeadlineExceededError, NetworkError, PeerLostError, ProtocolError
from elephant.net import socket_io
from elephant.net.deadline import Deadline

# How long a rank whose deadline has passed waits for the others to say that they are there.
_ANSWER_S = 1.0
# How long a rank that lost a data connection waits to hear why: the notice takes milliseconds.
_REASON_S = 1.0

_HEAD = struct.Struct("<4sHHQ")
_MAGIC = b"ENOT"
_MAX_TEXT_BYTES = 4000


class _Peer:
    """Another rank, and what has come from it."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.received = bytearray()

    def read(self) -> bool:
        """Takes in what has arrived; returns whether the connection has ended."""
        try:
            while data := self.sock.recv(1 << 14):
                self.received += data
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return True

    def tell(self, notice: bytes) -> None:
        """Sends a notice; a peer that is gone, or has stopped reading, is told nothing."""
        with contextlib.suppress(OSError):
            self.sock.send(notice)

    def close(self) -> None:
        """Closes the connection so that the peer can read what was told: unread bytes would reset it."""
        self.read()
        socket_io.shut_down(self.sock)
        self.sock.close()


class FailureDetector:
    """This rank's connections to all others."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._pending = select.poll()
        self._pending.register(self.fileno(), select.POLLIN)
        self._interrupted = False
        self._closed = False
        # Held while notices go out or the sockets are closed: an interrupt may come from another thread.
        self._telling = threading.Lock()
        self._farewell_messages: dict[int, ControlMessage] = {}
        self._asked_at: float | None = None
        self._answer_messages: dict[int, ControlMessage] = {}
        self._late: set[int] = set()

    def add(self, rank: int, sock: socket.socket) -> None:
        """Watches an authenticated connection to another rank; owned from here on."""
        socket_io.prepare(sock)
        self._peers[rank] = _Peer(rank, sock)
        self._selector.register(sock, selectors.EVENT_READ, self._peers[rank])

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when ``check`` has something to read."""
        return self._selector.fileno()

    def begin(self, operation: Operation) -> None:
        """Finds out, at the start of an operation, what has happened since the last one; raises as ``check`` does."""
        if self._pending.poll(0):
            self.check(operation)
        else:
            self._check_farewells(operation)

    def check(self, operation: Operation) -> None:
        """Reads what has come, and answers those that ask who is there.

        Raises:
            NetworkError: A rank is gone, has failed, or has closed before this operation; or
                this rank's collective was interrupted.
        """
        ended_peers: list[_Peer] = []
        for key, _ in self._selector.select(0):
            if key.data is None:
                raise PeerLostError(f"The collective was aborted on this rank, rank {self._rank}.")
            if key.data.read():
                ended_peers.append(key.data)
            self._heed(key.data, operation)
        self._check_farewells(operation)
        for peer in ended_peers:
            self._selector.unregister(peer.sock)
            if peer.rank not in self._farewell_messages:
                raise PeerLostError(
                    f"Rank {self._rank} lost rank {peer.rank} in {_named(operation)}: "
                    "its process died, or the network between the two broke."
                )

    def reason(self, rank: int, operation: Operation) -> NoReturn:
        """Waits for the reason why a data connection to a rank broke, and raises it.

        Raises:
            NetworkError: What ``check`` finds, or that the rank was lost.
        """
        grace = Deadline(_REASON_S, "Waiting for the reason")
        with contextlib.suppress(DeadlineExceededError):
            while True:
                self._selector.select(grace.remaining())
                self.check(operation)
                grace.remaining()
        farewell = self._farewell_messages.get(rank)
        raise (farewell and farewell.error) or PeerLostError(
            f"Rank {self._rank} lost rank {rank} in {_named(operation)}: the connection ended, and no rank reported an "
            f"error. See the executor log of rank {rank}."
        )

    def absence(self, operation: Operation) -> DeadlineExceededError:
        """Asks, after the deadline, who is in the operation, and returns the error that names those who are not.

        Raises:
            NetworkError: What ``check`` finds meanwhile.
        """
        self._asked_at = time.monotonic()
        self._send_all_peers(ControlMessage(ControlKind.WAITING, operation.sequence))
        grace = Deadline(_ANSWER_S, "Waiting for answers")
        with contextlib.suppress(DeadlineExceededError):
            while len(self._answer_messages) < len(self._peers):
                self._selector.select(grace.remaining())
                self.check(operation)
                grace.remaining()
        return operation.deadline.exceeded(self._story(operation))

    def interrupt(self, error: NetworkError, sequence: int) -> None:
        """Tells all others of a failure, and makes ``check`` raise on this rank; may come from another thread."""
        # First the others: a thread that is woken tells them what it knows, which is less, and closes.
        self._send_all_peers(ControlMessage.of(error, sequence))
        with self._telling:
            if not self._closed and not self._interrupted:
                self._interrupted = True
                self._wake_out.send(b"!")

    def close(self, message: ControlMessage) -> None:
        """Tells all others that and why this rank leaves, and closes the connections."""
        self._send_all_peers(message)
        with self._telling:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                peer.close()
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _send_all_peers(self, message: ControlMessage) -> None:
        data = message.to_bytes()
        with self._telling:
            for peer in () if self._closed else self._peers.values():
                peer.tell(data)

    def _heed(self, peer: _Peer, operation: Operation) -> None:
        while (message := take_notice(peer.received)) is not None:
            if message.kind is ControlKind.PRESENT:
                self._answer_messages[peer.rank] = message
                if self._asked_at is not None and float(message.text) < time.monotonic() - self._asked_at:
                    self._late.add(peer.rank)
            elif message.kind is ControlKind.WAITING:
                peer.tell(ControlMessage(ControlKind.PRESENT, operation.sequence, f"{operation.age_s:.6f}").to_bytes())
            else:
                self._farewell_messages.setdefault(peer.rank, message)

    def _check_farewells(self, operation: Operation) -> None:
        """Raises where a rank has left that this operation needs; what it has finished, the others can finish too."""
        for rank, farewell in self._farewell_messages.items():
            if farewell.sequence < operation.sequence:
                raise farewell.error or PeerLostError(
                    f"Rank {rank} closed its collective after operation {farewell.sequence}."
                )

    def _story(self, operation: Operation) -> str:
        """Says in a sentence or two who came, who came late, and who did not come."""
        absent = [rank for rank in self._peers if rank not in self._answer_messages]
        behind = {
            rank: message.sequence
            for rank, message in self._answer_messages.items()
            if message.sequence < operation.sequence and rank not in self._late
        }
        parts = [f"Ranks that did not arrive: {_listed(absent)}."] if absent else []
        if self._late:
            parts.append(f"Ranks that arrived too late: {_listed(self._late)}.")
        parts += [f"Rank {rank} is still in operation {sequence}." for rank, sequence in sorted(behind.items())]
        return " ".join(parts) or "All ranks have arrived: the connections are too slow for the data."


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _named(operation: Operation) -> str:
    return f"operation {operation.sequence} ({operation.name})" if operation.sequence else operation.name


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
        text: The error's message, or empty.
    """

    kind: ControlKind
    sequence: int
    text: str = ""

    @classmethod
    def of(cls, error: NetworkError, sequence: int) -> ControlMessage:
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


def take_notice(received: bytearray) -> ControlMessage | None:
    """Removes one whole notice from the start of what was received, and returns it; None where none is whole.

    Raises:
        ProtocolError: What was received is no notice.
    """
    if len(received) < _HEAD.size:
        return None
    magic, kind, length, sequence = _HEAD.unpack_from(received)
    if magic != _MAGIC or kind not in list(ControlKind) or length > _MAX_TEXT_BYTES:
        raise ProtocolError(f"Expected a notice. Received: {bytes(received[: _HEAD.size])!r}.")
    end = _HEAD.size + length
    if len(received) < end:
        return None
    text = received[_HEAD.size : end].decode("utf-8", "replace")
    del received[:end]
    return ControlMessage(ControlKind(kind), sequence, text)
