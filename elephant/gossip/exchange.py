"""Exchange of two workers as two small state machines, without sockets and clocks.

::

    asker                              answerer
    offer       ------------------->   computes the gift, and holds it
                <-------------------   reply, or not now
    confirm     ------------------->
    gives                              takes
                <-------------------   done

Neither has changed before the asker has sent its confirmation, and both do afterwards, whatever else happens to their
weights meanwhile. An asker whose time is over before the reply sends none, and the answerer lets go of what it holds
when the connection has ended, or when no confirmation can be on its way any more. Until the answerer is done, the asker
offers it nothing else: what is unread of a connection is lost with it.

Nobody waits for somebody that waits: the answerer answers in a thread of its own, whatever its training waits for, and
at once. It holds one gift at a time, so that no weights are given away twice.
"""

from __future__ import annotations

import enum
import threading

import numpy as np

from elephant.errors import ProtocolError
from elephant.gossip.weights import Parcel, Weights

# Partition and attempt: a worker that was started again is another one.
Member = tuple[int, int]


class Refusal(enum.Enum):
    """Reason of a worker not to exchange now."""

    BUSY = "busy"
    LEFT = "left"


class Answerer:
    """Answers the offers of others, one at a time.

    Args:
        weights: This worker's.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._asker: Member | None = None
        self._gift_parcel = Parcel(weights.held().values, 0.0, weights.held().steps)
        self._left = False
        self._changed = threading.Condition()

    def reply_to(self, asker: Member, offer_parcel: Parcel, *, patience_s: float = 0.0) -> Parcel | Refusal:
        """Returns the reply to an offer; the gift is held until `confirm` or `drop`.

        Args:
            asker: Who has made it.
            offer_parcel: The offer.
            patience_s: How long to wait for the end of another exchange.

        Raises:
            ProtocolError: It would make weights infinite.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._asker is None, patience_s)
            if self._left:
                return Refusal.LEFT
            if self._asker is not None:
                return Refusal.BUSY
            gift_parcel = self._weights.gift_for(offer_parcel)
            if not np.isfinite(gift_parcel.values).all():
                raise ProtocolError("Expected weights whose difference is finite. Received: some of which it is not.")
            self._asker, self._gift_parcel = asker, gift_parcel
            return self._weights.reply_to(self._gift_parcel)

    def confirm(self, asker: Member) -> None:
        """Takes the gift; raises ProtocolError where none is held for this asker."""
        with self._changed:
            if self._asker != asker:
                raise ProtocolError(f"Expected a confirmation of worker {self._asker}. Received: one of {asker}.")
            self._weights.take(self._gift_parcel)
            self._let_go()

    def drop(self, asker: Member) -> None:
        """Lets go of the gift of an asker that will not confirm; does nothing where it has."""
        with self._changed:
            if self._asker == asker:
                self._let_go()

    def leave(self, patience_s: float = 0.0) -> bool:
        """Answers no more; returns whether nothing is held, or was let go of within so many seconds."""
        with self._changed:
            self._left = True
            return self._changed.wait_for(lambda: self._asker is None, patience_s)

    def _let_go(self) -> None:
        self._asker = None
        self._changed.notify_all()


class Asking(enum.Enum):
    """State of an asker towards one peer."""

    IDLE = enum.auto()
    OFFERED = enum.auto()
    CONFIRMED = enum.auto()


class Asker:
    """This worker's exchanges with one peer that it asks. A worker has one offer under way, to one of its peers.

    Args:
        weights: This worker's.

    Attributes:
        state: Whether it may offer, waits for the reply, or waits until the peer is done.
    """

    def __init__(self, weights: Weights) -> None:
        self.state = Asking.IDLE
        self._weights = weights
        self._offer_parcel: Parcel | None = None
        self._gift_parcel: Parcel | None = None

    def offer(self) -> Parcel:
        """Returns the offer to send."""
        self._require(Asking.IDLE)
        self._offer_parcel, self.state = self._weights.offer(), Asking.OFFERED
        return self._offer_parcel

    def refused(self) -> None:
        """Notes that the peer does not exchange now, or that the time for its reply is over."""
        self._require(Asking.OFFERED)
        self._offer_parcel, self.state = None, Asking.IDLE

    def replied(self, reply_parcel: Parcel) -> None:
        """Takes the reply; the confirmation is to be sent next, and `confirmed` to be called where that was done."""
        self._require(Asking.OFFERED)
        if self._offer_parcel is not None:
            self._gift_parcel = self._weights.gift_from(self._offer_parcel, reply_parcel)

    def confirmed(self) -> None:
        """Gives the gift away."""
        self._require(Asking.OFFERED)
        if self._gift_parcel is None:
            raise ProtocolError("Expected a reply before a confirmation. Received: none.")
        self._weights.give(self._gift_parcel)
        self._offer_parcel = self._gift_parcel = None
        self.state = Asking.CONFIRMED

    def done(self) -> None:
        """Notes that the peer has taken the gift."""
        self._require(Asking.CONFIRMED)
        self.state = Asking.IDLE

    def _require(self, state: Asking) -> None:
        if self.state is not state:
            raise ProtocolError(f"Expected an exchange that is {state.name.lower()}. Received: {self.state.name}.")
