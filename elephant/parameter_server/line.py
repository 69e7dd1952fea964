"""Bytes over one authenticated connection, where what counts is that they keep coming and not how many there are."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from elephant.errors import DeadlineExceededError, PeerLostError
from elephant.net import transfer
from elephant.net.deadline import Deadline

Patience = Callable[[], float]

_SLICE_S = 0.2
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Line:
    """One connection: whole buffers in and out, and the number of bytes of each.

    Args:
        sock: Connected, authenticated and non-blocking; the line owns it from here on.
        peer: The peer's name for messages.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock = sock

    def receive(self, view: memoryview, patience: Patience) -> None:
        """Fills the view.

        Args:
            view: Bytes to fill.
            patience: Returns the seconds without a byte that are allowed at present; asked again as they pass.

        Raises:
            PeerLostError: The connection ended before the view was full.
            DeadlineExceededError: Nothing came for too long.
        """
        since, filled = time.monotonic(), 0
        while filled < len(view):
            count = transfer.receive_some(self._sock, view[filled:], self.peer)
            if count is None:
                self._wait(select.POLLIN, since, patience)
                continue
            filled += count
            since = time.monotonic()
        self.bytes_received += filled

    def send(self, buffers: Sequence[bytes | memoryview], patience: Patience) -> None:
        """Sends every buffer, in order.

        Raises:
            PeerLostError: The peer closed or reset the connection.
            DeadlineExceededError: It took nothing for too long.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        since = time.monotonic()
        while views:
            try:
                sent = self._sock.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                self._wait(select.POLLOUT, since, patience)
                continue
            except OSError as error:
                raise PeerLostError(f"The connection to {self.peer} was lost while sending: {error}.") from error
            since = time.monotonic()
            self.bytes_sent += sent
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    @property
    def hung_up(self) -> bool:
        """Whether the peer has ended its side, even where bytes of it still wait to be read."""
        poller = select.poll()
        poller.register(self._sock, _HANG_UP)
        return bool(poller.poll(0))

    def shut_down(self) -> None:
        """Ends both directions; a thread that waits on the line gets a PeerLostError."""
        transfer.shut_down(self._sock)

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
        transfer.wait(self._sock, events, Deadline(min(left_s, _SLICE_S) + 0.001, "Waiting for bytes"))
