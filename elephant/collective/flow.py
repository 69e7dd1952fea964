"""The pieces of one operation, in the order in which they come and go, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Flow:
    """The pieces that one operation sends and receives, and how far it is.

    Args:
        outgoing: Pieces for the right neighbour, in order.
        incoming: Where the pieces of the left neighbour go, in order.
        free: How many outgoing pieces may go at once; the others are forwarded.
        lag: Outgoing piece ``i`` is, from ``free`` on, incoming piece ``i - lag``.
        on_piece: Called with the number of each incoming piece when it is complete.
    """

    def __init__(
        self,
        outgoing: Sequence[memoryview],
        incoming: Sequence[memoryview],
        *,
        free: int,
        lag: int,
        on_piece: Callable[[int], None],
    ) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._free, self._lag = free, lag
        self._on_piece = on_piece
        self._sent = self._received = 0
        self.out = outgoing[0] if outgoing else None
        self.into = incoming[0] if incoming else None

    @property
    def may_send(self) -> bool:
        """Whether the next outgoing piece has been taken in, or needs not be."""
        return self.out is not None and self._sent < max(self._free, self._received + self._lag)

    @property
    def over(self) -> bool:
        """Whether everything has been sent and received."""
        return self.out is None and self.into is None

    @property
    def pieces_missing(self) -> int:
        """How many incoming pieces are not complete."""
        return len(self._incoming) - self._received

    @property
    def outgoing_bytes(self) -> int:
        """Length of all outgoing pieces together."""
        return sum(map(len, self._outgoing))

    def sent(self, count: int) -> None:
        """Notes that ``count`` bytes of the outgoing piece went out."""
        if self.out is None or count < len(self.out):
            self.out = self.out and self.out[count:]
            return
        self._sent += 1
        self.out = self._outgoing[self._sent] if self._sent < len(self._outgoing) else None

    def received(self, count: int) -> None:
        """Notes that ``count`` bytes of the incoming piece came in."""
        if self.into is None or count < len(self.into):
            self.into = self.into and self.into[count:]
            return
        self._on_piece(self._received)
        self._received += 1
        self.into = self._incoming[self._received] if self._received < len(self._incoming) else None
