"""Links between ranks 1, 2, 4, ... places apart, and Bruck's allgather over them.

In a group, a connection leads from every member to the one that comes 1, 2, 4, ... places
after it. Those at distance 1 are the ring; all together serve dissemination.

The allgather of Bruck et al., "Efficient algorithms for all-to-all communications in
multiport message-passing systems" (1997), section 3.2: in the round of distance d, every
member sends what it has of up to d blocks to the member d places after it. After
ceil(log2 N) rounds everybody has everything. Without blocks it is the barrier of Hensgen,
Finkel & Manber, "Two algorithms for barrier synchronization" (1988).

Each message begins with the request of its sender, who has compared it with those of
all the blocks that it passes on. So a member that comes to the end knows that all have
asked for the same, and one that asks for something else is found out in this operation.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elephant.collective.failure_detector import FailureDetector
from elephant.collective.operation import REQUEST_BYTES, Operation
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


def rounds(size: int) -> list[tuple[int, int]]:
    """Returns, for each round, the distance of the target and how many blocks go there.

    >>> rounds(5)
    [(1, 1), (2, 2), (4, 1)]
    """
    return [(distance, min(distance, size - distance)) for distance in distances(size)]


class BruckAllgather:
    """Exchanges blocks and requests in a group.

    Args:
        longest_block: Length of the longest block, in bytes.
    """

    def __init__(self, group: RankGroup, longest_block: int) -> None:
        self._group = group
        self._rank = group.members[group.position]
        self._rounds = [(group.pairs[distance], distance, count) for distance, count in rounds(group.size)]
        # Block i is that of the member i places before this one; the one of the lowest rank is to come first.
        places = {member: (group.position - place) % group.size for place, member in enumerate(group.members)}
        self._order = [places[member] for member in sorted(group.members)]
        self._gathered = np.empty(REQUEST_BYTES + group.size * longest_block, np.uint8)
        self._incoming = np.empty(REQUEST_BYTES + group.size * longest_block, np.uint8)

    def agree(self, operation: Operation) -> None:
        """Returns when all members have asked for this operation; raises as ``gather`` does."""
        self._exchange(operation, 0)

    def gather(self, operation: Operation, block: np.ndarray) -> list[np.ndarray]:
        """Returns every member's block, by rank.

        Args:
            block: Uint8, of the same length on all ranks that ask for this operation.

        Returns:
            Uint8 views of memory that the next call overwrites.

        Raises:
            ProtocolError: A member asked for something else.
            NetworkError: A rank failed, is gone, or did not arrive in time.
        """
        size = len(block)
        self._gathered[REQUEST_BYTES : REQUEST_BYTES + size] = block
        self._exchange(operation, size)
        starts = [REQUEST_BYTES + place * size for place in self._order]
        return [self._gathered[start : start + size] for start in starts]

    def _exchange(self, operation: Operation, size: int) -> None:
        gathered, incoming = self._gathered.data, self._incoming.data
        gathered[:REQUEST_BYTES] = operation.request
        for pair, distance, count in self._rounds:
            length = REQUEST_BYTES + count * size
            self._swap(pair, gathered[:length], incoming[:length], operation)
            start = REQUEST_BYTES + distance * size
            gathered[start : start + count * size] = incoming[REQUEST_BYTES:length]

    def _swap(self, pair: LinkPair, outgoing: memoryview, incoming: memoryview, operation: Operation) -> None:
        """Sends and receives one message; compares the requests as soon as that of the other side is there."""
        sent = received = 0
        while True:
            if sent < len(outgoing):
                sent += pair.send(outgoing[sent:] if sent else outgoing, operation)
            reading, writing = received < len(incoming), sent < len(outgoing)
            if not reading and not writing:
                return
            pair.wait(operation, reading=reading, writing=writing)
            if reading:
                before = received
                received += pair.receive(incoming[received:] if received else incoming, operation)
                if before < REQUEST_BYTES <= received:
                    operation.check(incoming[:REQUEST_BYTES], self._rank, pair.source_rank)
