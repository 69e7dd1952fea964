"""Directory of the workers that run now, and the choice of the next one to ask."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence


class PeerChoice(ABC):
    """Chooses whom a worker asks next.

    Args:
        partition: The worker itself.
        seed: Source of what is drawn.
    """

    def __init__(self, partition: int, seed: int) -> None:
        self._partition = partition
        self._random = random.Random(f"{seed}/{partition}")

    @abstractmethod
    def next(self, partitions: Sequence[int]) -> int | None:
        """Returns one of the other workers that run now, or None where there is none."""


class RandomPeer(PeerChoice):
    """Any other worker, each as likely: the graph of AD-PSGD in which all know each other.

    >>> RandomPeer(0, seed=1).next([2]), RandomPeer(0, seed=1).next([])
    (2, None)
    """

    def next(self, partitions: Sequence[int]) -> int | None:
        return self._random.choice(sorted(partitions)) if partitions else None


class ExponentialPeer(PeerChoice):
    """The worker that is 1, 2, 4, ... places further on, in turn: the directed exponential graph of SGP, appendix A.

    >>> peer_choice = ExponentialPeer(1, seed=0)
    >>> [peer_choice.next([0, 2, 3, 4]) for _ in range(4)]
    [2, 3, 0, 2]
    """

    def __init__(self, partition: int, seed: int) -> None:
        super().__init__(partition, seed)
        self._turn = 0

    def next(self, partitions: Sequence[int]) -> int | None:
        if not partitions:
            return None
        ring = sorted({*partitions, self._partition})
        hops = max((len(ring) - 1).bit_length(), 1)
        hop, self._turn = 1 << (self._turn % hops), self._turn + 1
        place = ring.index(self._partition)
        return ring[(place + hop) % len(ring)]


CHOICES: dict[str, type[PeerChoice]] = {"adpsgd": RandomPeer, "sgp": ExponentialPeer}
