"""Topology: which ranks share a host, and the route that an allreduce takes.

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

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from elephant.collective.operation import AllreduceAlgorithm, Bounds, Operation, ReduceOp
from elephant.collective.ring import Ring
from elephant.collective.shared_memory import HostGroup
from elephant.compression import Codec


def host_key() -> str:
    """Returns a key of this host, and of this network namespace on it.

    Containers with networks of their own are different hosts: they cannot reach each other's
    abstract Unix sockets. Names of hosts are not asked, because nobody vouches for them. On
    systems other than Linux, where ranks of one host have no faster way to each other than TCP,
    every process has a key of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/thread-self/ns/net')}"
    except OSError:
        return own_key()


def own_key() -> str:
    """Returns a key that no other process has: its host counts as one of its own."""
    return os.urandom(16).hex()


class Topology:
    """Hosts of the ranks.

    Attributes:
        hosts: The ranks of each host, ordered by rank; hosts ordered by their first rank.

    Example:
        >>> placement = Topology(["a", "b", "a", "b", "c"])
        >>> placement.hosts, placement.leaders, placement.ring
        ([[0, 2], [1, 3], [4]], [0, 1, 4], [0, 2, 1, 3, 4])
    """

    def __init__(self, keys: Sequence[str]) -> None:
        by_key: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            by_key.setdefault(key, []).append(rank)
        self.hosts = list(by_key.values())

    @property
    def leaders(self) -> list[int]:
        """The first rank of each host."""
        return [ranks[0] for ranks in self.hosts]

    @property
    def ring(self) -> list[int]:
        """All ranks, host by host, so that a ring of them leaves each host once."""
        return [rank for ranks in self.hosts for rank in ranks]

    def neighbors(self, rank: int) -> list[int]:
        """Returns the ranks of a rank's host, itself included."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def groups(self, rank: int) -> dict[str, list[int]]:
        """Returns the groups that a rank is to be connected in, by name.

        All ranks form one. Where some hosts have several ranks, those of a host and the first
        ranks of the hosts form one each; a group of one needs no connections, and is left out.

        >>> Topology(["a", "b", "a"]).groups(2), Topology(["a", "a"]).groups(1)
        ({'world': [0, 2, 1], 'host': [0, 2]}, {'world': [0, 1]})
        """
        groups = {"world": self.ring}
        if 1 < len(self.hosts) < len(self.ring):
            if len(own := self.neighbors(rank)) > 1:
                groups["host"] = own
            if rank in self.leaders:
                groups["leaders"] = self.leaders
        return groups


class HierarchicalAllreduce(AllreduceAlgorithm):
    """Several hosts, some with several ranks: reductions cross from host to host once per host.

    Args:
        host_group: The memory of this rank's host, or None where it is alone there; owned from here on.
        leader_ring: The ring of the hosts' first ranks, of which this is one, or None; owned from here on.
        whole_ring: The ring of all ranks, host by host; owned from here on.
    """

    agrees = False

    def __init__(self, host_group: HostGroup | None, leader_ring: Ring | None, whole_ring: Ring) -> None:
        self._host_group = host_group
        self._leader_ring = leader_ring
        self._whole_ring = whole_ring

    def allreduce(self, flat: np.ndarray, op: ReduceOp, codec: Codec | None, operation: Operation) -> None:
        if self._host_group is not None:
            wanted = (0, 0) if self._leader_ring is None else None
            self._host_group.allreduce(flat, op, None, operation, wanted=wanted, final=False)
        if self._leader_ring is not None:
            self._leader_ring.allreduce(flat, op, codec, operation)
        if self._host_group is not None:
            self._host_group.broadcast(flat.view(np.uint8), 0, operation)

    def reduce_scatter(self, flat: np.ndarray, bounds: Sequence[Bounds], op: ReduceOp, operation: Operation) -> None:
        self.allreduce(flat, op, None, operation)

    def allgather(self, blocks: Sequence[np.ndarray], operation: Operation) -> None:
        self._whole_ring.allgather(blocks, operation)

    def broadcast(self, raw: np.ndarray, root: int, operation: Operation) -> None:
        self._whole_ring.broadcast(raw, root, operation)

    def close(self) -> None:
        for part in (self._leader_ring, self._whole_ring, self._host_group):
            if part is not None:
                part.close()
