"""Peers of the watch: which ranks one is connected with, and such a connection."""

from __future__ import annotations

from elephant.net import socket_io
from elephant.net.tls import AnySocket

# So many ranks are all connected with each other.
_FEW = 8


def watched_ranks(rank: int, world_size: int) -> list[int]:
    """Returns the ranks that one is connected with for the watch; these are connected with it.

    >>> watched_ranks(2, 4), watched_ranks(0, 9), len(watched_ranks(5, 1024))
    ([0, 1, 3], [1, 2, 4, 5, 7, 8], 19)
    """
    if world_size <= _FEW:
        return [other for other in range(world_size) if other != rank]
    steps = [1 << power for power in range((world_size - 1).bit_length())]
    return sorted({(rank + way * step) % world_size for step in steps for way in (1, -1)} - {rank})


class WatchPeer:
    """Rank that this one is connected with: what has come from it, and what it has not taken yet."""

    def __init__(self, rank: int, sock: AnySocket) -> None:
        self.rank = rank
        self.sock = sock
        self.received = bytearray()
        self.unsent = bytearray()

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

    def flush(self) -> None:
        """Sends as much as the connection takes; a peer that is gone is told nothing."""
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.unsent.clear()

    def close(self) -> None:
        """Closes the connection so that the peer can read what was told: unread bytes would reset it."""
        self.read()
        socket_io.shut_down(self.sock)
        self.sock.close()
