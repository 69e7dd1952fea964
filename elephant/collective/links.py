"""Some of the ranks in a fixed order, and one rank's connections within them.

In a group, a connection leads from every member to the one that comes 1, 2, 4, ... places
after it. Those at distance 1 are the ring; all together serve dissemination.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elephant.collective.failure_detector import FailureDetector
from elephant.collective.operation import Operation
from elephant.errors import DeadlineExceededError
from elephant.net import socket_io


def distances(size: int) -> list[int]:
    """Returns the distances at which the members of a group of this size are connected.

    >>> distances(2), distances(5)
    ([1], [1, 2, 4])
    """
    return [1 << power for power in range((size - 1).bit_length())]


class LinkPair:
    """The two connections of one rank at one distance, one way each: data comes from one rank and goes to another.

    Args:
        source: Connected to the rank that data comes from, authenticated; owned from here on.
        source_rank: That rank.
        target: Connected to the rank that data goes to, likewise.
        target_rank: That rank.
        watch: Tells, while this rank waits for data, what happens elsewhere.
    """

    def __init__(
        self, source: socket.socket, source_rank: int, target: socket.socket, target_rank: int, watch: FailureDetector
    ) -> None:
        self.source_rank, self.target_rank = source_rank, target_rank
        self.target = target
        self.source = source
        self.watch = watch
        self._watch_descriptor = watch.fileno()
        self._pollers: dict[tuple[bool, bool, int | None], select.poll] = {}
        for sock in (source, target):
            socket_io.prepare(sock)

    def send(self, view: memoryview, operation: Operation) -> int:
        """Sends as much as the connection takes at once, and returns how many bytes that were."""
        try:
            return self.target.send(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.watch.reason(self.target_rank, operation)

    def receive(self, view: memoryview, operation: Operation) -> int:
        """Reads into the view what has arrived, and returns how many bytes that were."""
        try:
            count = self.source.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            count = 0
        if count == 0:
            self.watch.reason(self.source_rank, operation)
        return count

    def wait(self, operation: Operation, *, reading: bool, writing: bool, descriptor: int | None = None) -> None:
        """Returns when data has come, or may go, or a notice has come that ends nothing.

        Args:
            operation: What this rank is in.
            reading: Whether data is expected.
            writing: Whether there is data to send.
            descriptor: One of this process that may become readable too.

        Raises:
            NetworkError: Another rank failed, or is gone.
            DeadlineExceededError: The operation's time is over; the text names the ranks that did not arrive.
        """
        poller = self._pollers.get((reading, writing, descriptor)) or self._new_poller(reading, writing, descriptor)
        try:
            ready = poller.poll(operation.deadline.remaining_ms())
        except DeadlineExceededError:
            raise self.watch.absence(operation) from None
        for ready_one, _ in ready:
            if ready_one == self._watch_descriptor:
                self.watch.check(operation)

    def shut_down(self) -> None:
        """Ends both connections, so that a thread that is in one of them wakes up."""
        socket_io.shut_down(self.source)
        socket_io.shut_down(self.target)

    def close(self) -> None:
        """Closes both connections; the thread of a sender must have ended."""
        self.shut_down()
        self.source.close()
        self.target.close()

    def _new_poller(self, reading: bool, writing: bool, descriptor: int | None) -> select.poll:
        poller = select.poll()
        poller.register(self._watch_descriptor, select.POLLIN)
        if reading:
            poller.register(self.source, select.POLLIN)
        if writing:
            poller.register(self.target, select.POLLOUT)
        if descriptor is not None:
            poller.register(descriptor, select.POLLIN)
        self._pollers[reading, writing, descriptor] = poller
        return poller


@dataclass(frozen=True)
class RankGroup:
    """Some of the ranks, in the order in which they are connected.

    Args:
        members: The ranks.
        position: This rank's place among them.
        pairs: This rank's connections, by distance; none in a group of one.
    """

    members: Sequence[int]
    position: int
    pairs: Mapping[int, LinkPair]

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.members)

    def close(self) -> None:
        """Closes this rank's connections."""
        for pair in self.pairs.values():
            pair.close()
