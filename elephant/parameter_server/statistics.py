"""What a server counts, and what several servers' counts are together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_NAMES = ("bytes_in", "bytes_out", "refused", "duplicates", "superseded", "snapshots", "snapshot_failures")

# What each server says, by name.
FIELDS: Mapping[str, Any] = {
    **dict.fromkeys((*_NAMES, "waited_s", "seconds"), float),
    **dict.fromkeys(("updates", "iterations", "version", "server_restarts"), int),
    **dict.fromkeys(("staleness", "positions", "refused_connections"), dict[str, int]),
    "failure": str | None,
    "live": list[int],
}


class Counters:
    """Numbers that only grow, counted by many threads: ``waited_s`` for slower workers, and whole ones.

    Args:
        counts: By name, from a snapshot.
    """

    def __init__(self, counts: Mapping[str, float] | None = None) -> None:
        self._counts: dict[str, float] = {**dict.fromkeys(_NAMES, 0), "waited_s": 0.0, **(counts or {})}
        self._lock = threading.Lock()

    def add(self, name: str, count: float = 1) -> float:
        """Adds to one of the numbers, and returns it."""
        with self._lock:
            self._counts[name] += count
            return self._counts[name]

    def values(self) -> dict[str, float]:
        """Returns the numbers by name."""
        with self._lock:
            return dict(self._counts)


def combined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the statistics of servers that keep one vector together.

    Every push goes to each of them: what is counted in pushes is that of the server that has
    seen most, or least where only what all have seen is sure; bytes are added up.

    Args:
        parts: What each server says, in their order.
    """
    merged = dict(parts[0])
    for names, combine in _COMBINED:
        for name in names:
            merged[name] = combine([part[name] for part in parts])
    merged["refused_connections"] = added_up(part["refused_connections"] for part in parts)
    merged["failure"] = next((part["failure"] for part in parts if part["failure"]), None)
    merged["live"] = sorted({partition for part in parts for partition in part["live"]})
    merged["positions"] = {
        partition: min(part["positions"].get(partition, 0) for part in parts)
        for partition in sorted({key for part in parts for key in part["positions"]}, key=int)
    }
    return merged


def added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns what several counts by name are together.

    >>> added_up([{"10.0.0.7": 2}, {"10.0.0.9": 1, "10.0.0.7": 1}])
    {'10.0.0.7': 3, '10.0.0.9': 1}
    """
    return dict(sum(map(Counter, counts), Counter()))


_COMBINED: tuple[tuple[tuple[str, ...], Callable[[Any], Any]], ...] = (
    (("updates", "version", "snapshots"), min),
    (("refused", "seconds", "waited_s"), max),
    (("bytes_in", "bytes_out", "duplicates", "superseded", "snapshot_failures", "server_restarts"), sum),
)
