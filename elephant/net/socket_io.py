"""Whole buffers over sockets: sent and received in full, within a deadline or a patience.

The waits are ``poll`` calls and not socket timeouts, because a timeout belongs to
the whole socket: one thread that sends would change it for another that receives.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from elephant.errors import DeadlineExceededError, PeerLostError
from elephant.net.deadline import Deadline
from elephant.net.tls import AnySocket, TlsSocket

_MAX_BUFFERS = 64

Patience = Callable[[], float]
_SLICE_S = 0.2
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def prepare(sock: AnySocket) -> None:
    """Sets a connected socket up: non-blocking, no delay for small packets, probes that find a dead host."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def lose_after(sock: AnySocket, seconds: float) -> None:
    """Has the system end a connection whose peer's host does not confirm for so long what was sent to it.

    Without this a link that is cut is noticed after a quarter of an hour, or never by who waits for an answer. Other
    connections than TCP over a network, and systems without this option, keep their ways.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(round(seconds * 1000), 1))


def send_all(sock: AnySocket, buffers: Sequence[bytes | memoryview], deadline: Deadline, peer: str) -> None:
    """Sends every buffer, in order.

    Raises:
        PeerLostError: The peer closed or reset the connection.
        DeadlineExceededError: It did not take all in time; how much went out is unknown.
    """
    for _ in _sent(sock, buffers, peer, lambda _: wait(sock, select.POLLOUT, deadline)):
        pass


def _sent(
    sock: AnySocket, buffers: Sequence[bytes | memoryview], peer: str, await_room: Callable[[float], None]
) -> Iterator[int]:
    """Sends every buffer, in order; yields the number of bytes of each piece that went out.

    Args:
        await_room: Waits; gets the time of the last piece.
    """
    since = time.monotonic()
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        try:
            sent = sock.sendmsg(views[:_MAX_BUFFERS])
        except (BlockingIOError, InterruptedError):
            await_room(since)
            continue
        except OSError as error:
            raise PeerLostError(f"The connection to {peer} was lost while sending: {error}.") from error
        since = time.monotonic()
        yield sent
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def receive_into(sock: AnySocket, view: memoryview, deadline: Deadline, peer: str) -> None:
    """Fills the view with bytes from the socket.

    Raises:
        PeerLostError: The connection ended before the view was full.
        DeadlineExceededError: The bytes did not come in time.
    """
    for _ in _received(sock, view, peer, lambda _: wait(sock, select.POLLIN, deadline)):
        pass


def _received(sock: AnySocket, view: memoryview, peer: str, await_bytes: Callable[[float], None]) -> Iterator[int]:
    """Fills the view; yields the number of bytes of each piece that came in.

    Args:
        await_bytes: Waits; gets the time of the last piece.
    """
    since, filled = time.monotonic(), 0
    while filled < len(view):
        count = receive_some(sock, view[filled:], peer)
        if count is None:
            await_bytes(since)
            continue
        filled += count
        since = time.monotonic()
        yield count


def receive_some(sock: AnySocket, view: memoryview, peer: str) -> int | None:
    """Reads what has arrived, up to the view's length; returns the number of bytes, or None where nothing has.

    Raises:
        PeerLostError: The connection has ended.
    """
    try:
        count = sock.recv_into(view)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError as error:
        raise PeerLostError(f"The connection to {peer} was lost while receiving: {error}.") from error
    if count == 0:
        raise PeerLostError(f"{peer} closed the connection.")
    return count


def holds_bytes(sock: AnySocket) -> bool:
    """Returns whether bytes have arrived of which no poll tells, because they have left the system's buffers."""
    return isinstance(sock, TlsSocket) and sock.has_bytes()


def carried(sock: AnySocket) -> tuple[int, int]:
    """Returns how many bytes an encrypted connection has sent, and received; of others none are counted."""
    return (sock.bytes_sent, sock.bytes_received) if isinstance(sock, TlsSocket) else (0, 0)


def wait(sock: AnySocket, events: int, deadline: Deadline) -> None:
    """Returns when one of the poll events has come, or an error that the next call on the socket will show.

    Raises:
        DeadlineExceededError: Nothing came in time.
    """
    if events & select.POLLIN and holds_bytes(sock):
        return
    poller = select.poll()
    try:
        poller.register(sock, events)
    except ValueError:
        return
    poller.poll(deadline.remaining_ms())


def shut_down(sock: AnySocket) -> None:
    """Ends both directions, so that a thread that waits on the socket wakes up; does nothing where they have ended."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class SocketIO:
    """One connection: whole buffers in and out, and the number of bytes of each."""

    def __init__(self, sock: AnySocket, peer: str) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock = sock

    def receive(self, view: memoryview, patience: Patience) -> None:
        """Fills the view.

        Args:
            patience: Returns the seconds without a byte that are allowed at present; asked again as they pass.

        Raises:
            PeerLostError: The connection ended before the view was full.
            DeadlineExceededError: Nothing came for too long.
        """
        for count in _received(self._sock, view, self.peer, lambda since: self._wait(select.POLLIN, since, patience)):
            self.bytes_received += count

    def send(self, buffers: Sequence[bytes | memoryview], patience: Patience) -> None:
        """Sends every buffer, in order.

        Raises:
            PeerLostError: The peer closed or reset the connection.
            DeadlineExceededError: It took nothing for too long.
        """
        for count in _sent(self._sock, buffers, self.peer, lambda since: self._wait(select.POLLOUT, since, patience)):
            self.bytes_sent += count

    @property
    def hung_up(self) -> bool:
        """True if the peer has ended its side, even where bytes of it still wait to be read."""
        poller = select.poll()
        poller.register(self._sock, _HANG_UP)
        return bool(poller.poll(0))

    def shut_down(self) -> None:
        """Ends both directions; a thread that waits on the line gets a PeerLostError."""
        shut_down(self._sock)

    def close(self, *, abort: bool = False) -> None:
        """Closes the connection: after what was sent, or at once."""
        if abort:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._sock.close()

    def _wait(self, events: int, since: float, patience: Patience) -> None:
        allowed_s = patience()
        left_s = since + allowed_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError(
                f"Expected {self.peer} to go on with a message. Received: nothing for {allowed_s:g} s."
            )
        wait(self._sock, events, Deadline(min(left_s, _SLICE_S) + 0.001, "Waiting for bytes"))
