"""Generation: what all groups of a run's ranks share. They live together, and where one of them breaks, all do.

It is never repaired: ranks that go on form a new one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from elephant.collective.communicator import Communicator
from elephant.collective.connector import PeerConnector
from elephant.collective.links import RankGroup
from elephant.collective.operation import Operation
from elephant.collective.watch.control_message import ControlKind, ControlMessage
from elephant.collective.watch.failure_detector import FailureDetector
from elephant.errors import NetworkError, PeerLostError


class Member(ABC):
    """Group or link of a generation, which has connections of its own."""

    @abstractmethod
    def let_go(self) -> None:
        """Closes its connections, now or when the operation that is under way has been woken; from any thread."""


class Generation:
    """The ranks of a run as long as none of them is lost.

    Args:
        detector: Tells of the other ranks; owned from here on.
        connector: Makes connections to them; owned from here on.

    Attributes:
        error: Why nothing more can be done; None as long as all is well.
        groups: How many groups there have been so far, as far as this rank knows: the number of the next one.
    """

    def __init__(self, detector: FailureDetector, connector: PeerConnector) -> None:
        self.detector = detector
        self.connector = connector
        self.error: NetworkError | None = None
        self.groups = 1
        self._members: list[Member] = []
        self._is_over = False
        self._state = threading.Lock()

    @property
    def rank(self) -> int:
        """This rank, in the run."""
        return self.connector.rank

    def require_whole(self) -> None:
        """Raises what has broken it, if something has."""
        if self.error is not None:
            raise type(self.error)(f"The collective is broken since an earlier failure: {self.error}")

    def add(self, member: Member) -> None:
        """Takes note of a group or a link, which is let go with all others; it says itself when it has left."""
        with self._state:
            self._members.append(member)
        if self.error is not None:
            member.let_go()

    def leave(self, member: Member) -> None:
        """Takes note that a member has closed its connections. The last one closes those of the detector."""
        with self._state:
            if member in self._members:
                self._members.remove(member)
            if self.error is None or self._members or self._is_over:
                return
            self._is_over = True
        self.connector.close()
        self.detector.close()

    def fail(self, error: NetworkError, sequence: int, *, own_error: NetworkError | None = None) -> None:
        """Breaks all groups, on all ranks; later failures only follow from the first.

        Args:
            sequence: The last operation that was finished, of the group that failed.
            own_error: What operations that are under way on this rank raise; the error where it is None.
        """
        with self._state:
            is_first = self.error is None
            self.error = self.error or error
        if is_first:
            self.detector.interrupt(error, sequence, own_error=own_error or error)
        self._let_all_go()

    def close(self, sequence: int) -> None:
        """Leaves in good order, after the last operation of all ranks, and tells the others."""
        with self._state:
            if self.error is not None:
                return
            self.error = PeerLostError(f"The collective was closed on this rank, rank {self.rank}.")
        self.detector.tell(ControlMessage(ControlKind.CLOSED, sequence))
        self._let_all_go()

    def _let_all_go(self) -> None:
        for member in list(self._members):
            member.let_go()


class GroupBuilder(ABC):
    """Maker of the groups of a generation; see `elephant.collective.bootstrap`."""

    @abstractmethod
    def build(self, ranks: tuple[int, ...], number: int, operation: Operation) -> Communicator:
        """Connects this rank with others; all of these call it.

        Args:
            ranks: Numbers in the run, in the order of the group; this rank's is among them.
            number: The group's.
            operation: In which they do.
        """

    @abstractmethod
    def connect(self, group: RankGroup, distance: int, name: str, ranks: Sequence[int], operation: Operation) -> None:
        """Adds a pair of connections at one more distance to a group; all members call it.

        Args:
            name: Of the group, another one than any other of the run's.
            ranks: Numbers in the run, by rank.
        """

    @abstractmethod
    def renew(self, group: RankGroup, distance: int, name: str, ranks: Sequence[int], operation: Operation) -> None:
        """Makes a pair's encrypted connections again that have carried enough; all members call it, between operations.

        Args:
            name: Of the group, as in ``connect``.
            ranks: Numbers in the run, by rank.
        """
