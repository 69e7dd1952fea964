"""Which gradients travel together: buckets in the order in which the backward pass makes them.

The backward pass finds the last layer's gradients first. Buckets filled from the
end of the list can be summed over the ranks while earlier layers are still being
computed (Li et al. 2020, "PyTorch Distributed", section 3.2).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elephant.collective.base import Collective

_MEGABYTE = 1 << 20
# Below this much there is too little to hide behind the backward pass.
WORTH_SPLITTING = 8 * _MEGABYTE
_SMALLEST, _LARGEST = 4 * _MEGABYTE, 32 * _MEGABYTE
_BUCKETS = 6
# From here on a link is as fast as the processor copies, and sending takes the time that it should hide.
_FAST_BYTES_PER_S = 2e9
_PROBE_BYTES = 2 * _MEGABYTE
_PROBES = 3


@dataclass(frozen=True)
class LinkSpeed:
    """What an allreduce over a collective takes.

    Args:
        latency_s: Seconds of one of a few bytes.
        bytes_per_s: Bytes of the array per second, for long ones.
    """

    latency_s: float
    bytes_per_s: float


def measure_link(collective: Collective) -> LinkSpeed:
    """Times a few allreduces; all ranks call it, and all get the same numbers."""
    tiny, long = np.zeros(1, np.float32), np.zeros(_PROBE_BYTES // 4, np.float32)
    # The first ones grow socket buffers.
    took = [[_seconds(collective, array) for _ in range(_PROBES + 1)][1:] for array in (tiny, long)]
    slowest = np.array([min(times) for times in took])
    collective.allreduce_(slowest, "max")
    return LinkSpeed(latency_s=float(slowest[0]), bytes_per_s=_PROBE_BYTES / float(slowest[1]))


def _seconds(collective: Collective, array: np.ndarray) -> float:
    began = time.perf_counter()
    collective.allreduce_(array)
    return time.perf_counter() - began


def automatic_bucket_bytes(total_bytes: int, link: LinkSpeed) -> int:
    """Returns how long buckets should be: several for much data on a slow link, else one.

    A bucket is long enough that its latency is a twentieth of its time at most.

    Args:
        total_bytes: Length of all gradients.
        link: What the ranks measured.

    >>> automatic_bucket_bytes(96 << 20, LinkSpeed(latency_s=1e-4, bytes_per_s=5e8)) >> 20
    16
    >>> automatic_bucket_bytes(96 << 20, LinkSpeed(latency_s=1e-4, bytes_per_s=5e9)) >> 20
    96
    """
    if total_bytes < WORTH_SPLITTING or link.bytes_per_s >= _FAST_BYTES_PER_S:
        return total_bytes
    even = min(max(total_bytes // _BUCKETS, _SMALLEST), _LARGEST)
    return min(max(even, int(20 * link.latency_s * link.bytes_per_s)), total_bytes)


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Divides arrays into buckets, from the last array to the first.

    Args:
        sizes: Bytes of each array, first layer first.
        bucket_bytes: A bucket is closed when it holds this much.

    Returns:
        The arrays' positions by bucket, buckets in the order in which they are full; every
        position is in one bucket, in descending order.

    >>> plan_buckets([10, 1, 1, 6, 3], 8)
    [[4, 3], [2, 1, 0]]
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(sizes))):
        if filled >= bucket_bytes and sizes[index]:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets if sizes else []
