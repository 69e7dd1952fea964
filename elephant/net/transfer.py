"""Whole buffers through a non-blocking socket within a deadline.

The waits are ``poll`` calls and not socket timeouts, because a timeout belongs to
the whole socket: one thread that sends would change it for another that receives.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence

from elephant.errors import PeerLostError
from elephant.net.deadline import Deadline

_MAX_BUFFERS = 64


def prepare(sock: socket.socket) -> None:
    """Sets a connected socket up: non-blocking, no delay for small packets, probes that find a dead host."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def lose_after(sock: socket.socket, seconds: float) -> None:
    """Has the system end a connection whose peer's host does not confirm for so long what was sent to it.

    Without this a link that is cut is noticed after a quarter of an hour, or never by who waits for an answer. Other
    connections than TCP over a network, and systems without this option, keep their ways.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(round(seconds * 1000), 1))


def send_all(sock: socket.socket, buffers: Sequence[bytes | memoryview], deadline: Deadline, peer: str) -> None:
    """Sends every buffer, in order.

    Raises:
        PeerLostError: The peer closed or reset the connection.
        DeadlineExceededError: It did not take all in time; how much went out is unknown.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        try:
            sent = sock.sendmsg(views[:_MAX_BUFFERS])
        except (BlockingIOError, InterruptedError):
            wait(sock, select.POLLOUT, deadline)
            continue
        except OSError as error:
            raise PeerLostError(f"The connection to {peer} was lost while sending: {error}.") from error
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def receive_into(sock: socket.socket, view: memoryview, deadline: Deadline, peer: str) -> None:
    """Fills the view with bytes from the socket.

    Raises:
        PeerLostError: The connection ended before the view was full.
        DeadlineExceededError: The bytes did not come in time.
    """
    filled = 0
    while filled < len(view):
        count = receive_some(sock, view[filled:], peer)
        if count is None:
            wait(sock, select.POLLIN, deadline)
        else:
            filled += count


def receive_some(sock: socket.socket, view: memoryview, peer: str) -> int | None:
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


def wait(sock: socket.socket, events: int, deadline: Deadline) -> None:
    """Returns when one of the poll events has come, or an error that the next call on the socket will show.

    Raises:
        DeadlineExceededError: Nothing came in time.
    """
    poller = select.poll()
    try:
        poller.register(sock, events)
    except ValueError:
        return
    poller.poll(deadline.remaining_ms())


def shut_down(sock: socket.socket) -> None:
    """Ends both directions, so that a thread that waits on the socket wakes up; does nothing where they have ended."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
