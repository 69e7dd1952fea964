"""The pieces of one operation, in the order in which they come and go, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def _nothing(index: int) -> None:
    pass


class Flow:
    """The pieces that one operation sends and receives, and how far it is.

    Args:
        outgoing: Pieces for the next rank, in order.
        incoming: Where the pieces of the rank before go, in order.
        free: How many outgoing pieces may go at once; the others are forwarded.
        lag: Outgoing piece ``i`` is, from ``free`` on, incoming piece ``i - lag``.
        on_leaving: Called with the number of each outgoing piece before its first byte goes.
        on_arrived: Called with the number of each incoming piece when it is complete.
    """

    def __init__(
        self,
        outgoing: Sequence[memoryview],
        incoming: Sequence[memoryview],
        *,
        free: int,
        lag: int,
        on_leaving: Callable[[int], None] = _nothing,
        on_arrived: Callable[[int], None] = _nothing,
    ) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._free, self._lag = free, lag
        self._on_leaving, self._on_arrived = on_leaving, on_arrived
        self._sent = self._received = 0
        self._out: memoryview | None = None
        self.into = incoming[0] if incoming else None

    @property
    def all_sent(self) -> bool:
        """Whether nothing is left to be sent."""
        return self._sent == len(self._outgoing)

    @property
    def may_send(self) -> bool:
        """Whether there is a next outgoing piece, and it has been taken in, or needs not be."""
        return not self.all_sent and self._sent < max(self._free, self._received + self._lag)

    @property
    def over(self) -> bool:
        """Whether everything has been sent and received."""
        return self.all_sent and self.into is None

    def next_out(self) -> memoryview:
        """Returns the rest of the piece to be sent, which ``may_send`` must allow."""
        if self._out is None:
            self._on_leaving(self._sent)
            self._out = self._outgoing[self._sent]
        return self._out

    def sent(self, count: int) -> None:
        """Notes that ``count`` bytes of ``next_out`` went out."""
        rest = self.next_out()[count:]
        if rest:
            self._out = rest
        else:
            self._out = None
            self._sent += 1

    def received(self, count: int) -> bool:
        """Notes that ``count`` bytes of the incoming piece came in; returns whether it is complete."""
        if self.into is None or count < len(self.into):
            self.into = self.into and self.into[count:]
            return False
        self._on_arrived(self._received)
        self._received += 1
        self.into = self._incoming[self._received] if self._received < len(self._incoming) else None
        return True
