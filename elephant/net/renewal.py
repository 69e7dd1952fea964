"""Renewal of connections: how a stream goes on over a new one when its keys are worn, and loses no message.

::

    client -> server   on a new connection: goes on, a number       (and from here on all that the client sends)
    client -> server   on the old one:      has moved, the number   (its last message there)
    server -> client   on the old one:      has moved               (its last message there; then all on the new one)

Each side reads the old connection to that last message, and then the new one. So what is on its way stays in order, and
neither side waits for the other before it goes on sending. The new connection has proved the token as any other.
"""

from __future__ import annotations

import threading

from elephant.net.tls import AnySocket

GOES_ON, HAS_MOVED = "net/goes on", "net/has moved"
# A server may be at work on what came before, or in the middle of a long message.
MOVED_WITHIN_S = 600.0
# The new connection was there before the old one told of it.
_THERE_WITHIN_S = 30.0


class Renewals:
    """Connections of a server that go on for others of its connections, until these take them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._socks: dict[str, AnySocket] = {}
        self._closed = False

    def give(self, number: str, sock: AnySocket) -> bool:
        """Waits until the connection that this one goes on for has taken it; returns False where it does not."""
        with self._changed:
            if self._closed or number in self._socks:
                return False
            self._socks[number] = sock
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or number not in self._socks, MOVED_WITHIN_S)
            return self._socks.pop(number, None) is None

    def take(self, number: str) -> AnySocket | None:
        """Returns the connection with this number when it is there; None where it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or number in self._socks, _THERE_WITHIN_S)
            sock = self._socks.pop(number, None)
            self._changed.notify_all()
            return sock

    def close(self) -> None:
        """Has nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
