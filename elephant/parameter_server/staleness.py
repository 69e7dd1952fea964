"""Staleness of pushes, and the bound on it: how far a worker may be ahead of the slowest one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

_LOOK_S = 0.2
# Above this all are counted together, so that the histogram stays small.
_HIGHEST = 255


class Staleness:
    """Counts, for each push, how many pushes were applied since its worker last pulled.

    A worker that exchanges in the background has computed its gradient on the weights of the pull before
    that one: how much older they are is not counted.

    Args:
        histogram: What ``histogram`` returned, from a snapshot.
    """

    def __init__(self, histogram: Mapping[str, int] | None = None) -> None:
        self._pulled: dict[int, int] = {}
        self._histogram = Counter({int(staleness): count for staleness, count in (histogram or {}).items()})
        self._lock = threading.Lock()

    def registered(self, partition: int, updates: int) -> None:
        """Notes a worker that has just connected; one that was here before keeps its count."""
        with self._lock:
            self._pulled[partition] = min(self._pulled.get(partition, updates), updates)

    def pulled(self, partition: int, updates: int) -> None:
        """Notes that a worker began to pull after so many pushes had been applied."""
        with self._lock:
            self._pulled[partition] = updates

    def of_push(self, partition: int, updates: int) -> int:
        """Returns the staleness of a push before which ``updates`` others were applied, and counts it."""
        with self._lock:
            staleness = max(updates - self._pulled.get(partition, updates), 0)
            self._histogram[min(staleness, _HIGHEST)] += 1
            return staleness

    def histogram(self) -> dict[str, int]:
        """Returns how many pushes had which staleness; 255 stands for all above it as well."""
        with self._lock:
            return {str(staleness): self._histogram[staleness] for staleness in sorted(self._histogram)}


class Clock:
    """The bound of stale-synchronous training: nobody is more than so many steps ahead of the slowest live worker.

    Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013, section 3.
    A worker is live from its HELLO until it disconnects or has finished.

    Args:
        max_staleness: Steps that a worker may be ahead; None does not limit it.
    """

    def __init__(self, max_staleness: int | None) -> None:
        self._max_staleness = max_staleness
        self._steps: dict[int, int] = {}
        self._connections: Counter[int] = Counter()
        self._finished: set[int] = set()
        self._open = False
        self._changed = threading.Condition()

    def enter(self, partition: int, step: int) -> None:
        """Notes a worker that has connected, and has done so many steps."""
        with self._changed:
            self._connections[partition] += 1
            self._finished.discard(partition)
            self._steps[partition] = step
            self._changed.notify_all()

    def leave(self, partition: int) -> None:
        """Notes that a worker has disconnected."""
        with self._changed:
            self._connections[partition] -= 1
            self._changed.notify_all()

    def finish(self, partition: int) -> None:
        """Notes that a worker has done all of its steps."""
        with self._changed:
            self._finished.add(partition)
            self._changed.notify_all()

    def advance(self, partition: int, step: int) -> None:
        """Notes that a worker has done so many steps."""
        with self._changed:
            self._steps[partition] = max(self._steps.get(partition, 0), step)
            self._changed.notify_all()

    def release(self) -> None:
        """Lets all workers pass from now on, because the fit is to end."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait(self, partition: int, timeout_s: float, given_up: Callable[[], bool]) -> bool:
        """Waits until a worker may go on.

        Returns:
            Whether the wait has ended before its time.
        """
        if self._max_staleness is None:
            return True
        end = time.monotonic() + timeout_s
        with self._changed:
            while not self._may_pass(partition) and not given_up():
                if time.monotonic() >= end:
                    return False
                self._changed.wait(_LOOK_S)
        return True

    def live(self) -> list[int]:
        """Returns the partitions whose workers are live."""
        with self._changed:
            return sorted(self._live())

    def _live(self) -> list[int]:
        return [each for each, count in self._connections.items() if count > 0 and each not in self._finished]

    def _may_pass(self, partition: int) -> bool:
        live = self._live()
        if self._open or self._max_staleness is None or not live:
            return True
        return self._steps.get(partition, 0) - min(self._steps[each] for each in live) <= self._max_staleness
