"""Which ranks share a host, and in which order the ranks of several hosts stand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def host_key() -> str:
    """Returns what only processes of this host, and of this network namespace on it, have in common.

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


class Placement:
    """Where the ranks are.

    Args:
        keys: Every rank's host key, by rank.

    Attributes:
        hosts: The ranks of each host, ordered by rank; hosts ordered by their first rank.

    Example:
        >>> placement = Placement(["a", "b", "a", "b", "c"])
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

    def neighbours(self, rank: int) -> list[int]:
        """Returns the ranks of a rank's host, itself included."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def groups(self, rank: int) -> dict[str, list[int]]:
        """Returns the groups that a rank is to be connected in, by name.

        All ranks form one. Where some hosts have several ranks, those of a host and the first
        ranks of the hosts form one each; a group of one needs no connections, and is left out.

        >>> Placement(["a", "b", "a"]).groups(2), Placement(["a", "a"]).groups(1)
        ({'world': [0, 2, 1], 'host': [0, 2]}, {'world': [0, 1]})
        """
        groups = {"world": self.ring}
        if 1 < len(self.hosts) < len(self.ring):
            if len(own := self.neighbours(rank)) > 1:
                groups["host"] = own
            if rank in self.leaders:
                groups["leaders"] = self.leaders
        return groups
