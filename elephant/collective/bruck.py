"""Small blocks to everybody in few rounds, whatever the number of ranks.

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

import numpy as np

from elephant.collective.links import LinkPair, RankGroup, distances
from elephant.collective.operation import REQUEST_BYTES, Operation


def rounds(size: int) -> list[tuple[int, int]]:
    """Returns, for each round, the distance of the target and how many blocks go there.

    >>> rounds(5)
    [(1, 1), (2, 2), (4, 1)]
    """
    return [(distance, min(distance, size - distance)) for distance in distances(size)]


class BruckAllgather:
    """Exchanges blocks and requests in a group.

    Args:
        group: Who takes part.
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
            operation: What this rank is in.
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
