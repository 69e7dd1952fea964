"""Link cost: what a message and a byte cost between the members of a group, and how long an array is reduced in rounds.

The model is that of Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH"
(2005): a message takes a latency, and a time for each of its bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Measured with 3 to 8 ranks; in larger groups the least.
ROUNDS_BYTES = 1 << 22
# Rounds read and write whole parts of the array, pieces of a ring stay in the cache: the share of a byte's time.
_UNCACHED = 0.2


@dataclass(frozen=True)
class LinkCost:
    """Cost of links and sums, as the slowest member of a group measured it.

    Args:
        latency_s: Seconds of an exchange of a few bytes with the members next to it.
        byte_s: Seconds of a byte more.
        sum_byte_s: Seconds to add a byte to another.
    """

    latency_s: float
    byte_s: float
    sum_byte_s: float


def ring_s(nbytes: int, size: int, cost: LinkCost) -> float:
    """Returns the seconds of an allreduce round the ring of a group; sums are made while pieces are on their way."""
    return 2 * (size - 1) * (cost.latency_s + nbytes / size * cost.byte_s)


def rounds_s(nbytes: int, size: int, cost: LinkCost) -> float:
    """Returns the seconds of an allreduce in rounds: fewer latencies, the bytes of the ring, and sums that add to them.

    >>> cost = LinkCost(latency_s=7e-5, byte_s=4e-10, sum_byte_s=2e-10)
    >>> round(ring_s(10**8, 1024, cost), 3), round(rounds_s(10**8, 1024, cost), 3)
    (0.223, 0.109)
    """
    passed = nbytes * (size - 1) / size
    return 2 * math.ceil(math.log2(size)) * cost.latency_s + passed * ((2 + _UNCACHED) * cost.byte_s + cost.sum_byte_s)


def rounds_limit(size: int, cost: LinkCost) -> int:
    """Returns how long an array is at most, in bytes, that takes less time in rounds than round the ring.

    >>> cost = LinkCost(latency_s=7e-5, byte_s=4e-10, sum_byte_s=2e-10)
    >>> [rounds_limit(size, cost) >> 20 for size in (9, 64, 1024)]
    [4, 27, 483]
    """
    saved = 2 * (size - 1 - math.ceil(math.log2(size))) * cost.latency_s
    lost = (size - 1) / size * (_UNCACHED * cost.byte_s + cost.sum_byte_s)
    return max(int(saved / lost), ROUNDS_BYTES)
