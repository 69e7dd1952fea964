"""The ways that large arrays go, by where the ranks are.

============================  ======================================================
ranks                         way
============================  ======================================================
on one host                   memory that they share
on a host each                a ring
several on some of the hosts  memory within a host, then a ring of one rank per host
============================  ======================================================

Where the ranks of a host cannot share memory, all ranks form a ring, host by host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from elephant.collective.operation import Operation
from elephant.collective.reduction import Reduction
from elephant.collective.ring import Ring
from elephant.collective.shared import Shared
from elephant.compression import Codec

Bounds = Sequence[tuple[int, int]]


class Route(ABC):
    """Moves large arrays between all ranks.

    Attributes:
        agrees: Whether its operations begin with an agreement of all ranks, so that none is needed before.
    """

    agrees: bool

    @abstractmethod
    def allreduce(self, flat: np.ndarray, reduction: Reduction, codec: Codec | None, operation: Operation) -> None:
        """Reduces a flat array, not empty, of all ranks in place."""

    @abstractmethod
    def reduce_scatter(self, flat: np.ndarray, bounds: Bounds, reduction: Reduction, operation: Operation) -> None:
        """Reduces a flat array, not empty, of all ranks so that this rank's part is complete in place.

        The other parts are undefined then. ``bounds`` has where the parts begin and end, by rank.
        """

    @abstractmethod
    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        """Fills every rank's block, uint8 of any length and not all empty, by rank; this rank's is there."""

    @abstractmethod
    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        """Copies the root's bytes, uint8 and not empty, to all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of threads and memory, and ends the connections that threads are in."""


class RingRoute(Route):
    """All ranks in one ring.

    Args:
        ring: Connects them; owned from here on.
        members: The ranks, in the order of the ring.
    """

    agrees = False

    def __init__(self, ring: Ring, members: Sequence[int]) -> None:
        self._ring = ring
        self._members = members

    def allreduce(self, flat: np.ndarray, reduction: Reduction, codec: Codec | None, operation: Operation) -> None:
        self._ring.allreduce(flat, reduction, codec, operation)

    def reduce_scatter(self, flat: np.ndarray, bounds: Bounds, reduction: Reduction, operation: Operation) -> None:
        self._ring.reduce_scatter(flat, [bounds[rank] for rank in self._members], reduction, operation)

    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        self._ring.allgather([blocks[rank] for rank in self._members], operation)

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        self._ring.broadcast(raw, self._members.index(root), operation)

    def close(self) -> None:
        self._ring.close()


class SharedRoute(Route):
    """All ranks on one host, where codecs have nothing to encode.

    Args:
        shared: Their memory; owned from here on.
        rank: This rank.
    """

    agrees = True

    def __init__(self, shared: Shared, rank: int) -> None:
        self._shared = shared
        self._rank = rank

    def allreduce(self, flat: np.ndarray, reduction: Reduction, codec: Codec | None, operation: Operation) -> None:
        self._shared.allreduce(flat, reduction, operation)

    def reduce_scatter(self, flat: np.ndarray, bounds: Bounds, reduction: Reduction, operation: Operation) -> None:
        self._shared.allreduce(flat, reduction, operation, wanted=bounds[self._rank])

    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        self._shared.allgather(blocks, operation)

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        self._shared.broadcast(raw, root, operation)

    def close(self) -> None:
        self._shared.close()


class HierarchicalRoute(Route):
    """Several hosts, some with several ranks: reductions cross from host to host once per host.

    Args:
        shared: The memory of this rank's host, or None where it is alone there; owned from here on.
        leaders: The ring of the hosts' first ranks, of which this is one, or None; owned from here on.
        everybody: The ring of all ranks, host by host; owned from here on.
    """

    agrees = False

    def __init__(self, shared: Shared | None, leaders: Ring | None, everybody: RingRoute) -> None:
        self._shared = shared
        self._leaders = leaders
        self._everybody = everybody

    def allreduce(self, flat: np.ndarray, reduction: Reduction, codec: Codec | None, operation: Operation) -> None:
        if self._shared is not None:
            wanted = (0, 0) if self._leaders is None else None
            self._shared.allreduce(flat, reduction, operation, wanted=wanted, final=False)
        if self._leaders is not None:
            self._leaders.allreduce(flat, reduction, codec, operation)
        if self._shared is not None:
            self._shared.broadcast(flat.view(np.uint8), 0, operation)

    def reduce_scatter(self, flat: np.ndarray, bounds: Bounds, reduction: Reduction, operation: Operation) -> None:
        self.allreduce(flat, reduction, None, operation)

    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        self._everybody.allgather(blocks, operation)

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        self._everybody.broadcast(raw, root, operation)

    def close(self) -> None:
        for part in (self._leaders, self._everybody, self._shared):
            if part is not None:
                part.close()
