"""Parameter-server state machine, without I/O: applies pushes, answers pulls, tracks staleness."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.optimizers import rule_of
from elephant.parameter_server.protocol import TEXT_BYTES, Flags, RequestHeader, Status
from elephant.parameter_server.push_log import Entry, PushLog
from elephant.parameter_server.store import Averages, SnapshotImage, Store

_LOOK_S = 0.2
# Above this all are counted together, so that the histogram stays small.
_HIGHEST = 255

_NAMES = ("bytes_in", "bytes_out", "refused", "duplicates", "superseded", "snapshots", "snapshot_failures")
# What each server says, by name.
FIELDS: Mapping[str, Any] = {
    **dict.fromkeys((*_NAMES, "waited_s", "seconds"), float),
    **dict.fromkeys(("updates", "iterations", "version", "server_restarts"), int),
    **dict.fromkeys(("staleness", "positions", "refused_connections"), dict[str, int]),
    "failure": str | None,
    "live": list[int],
}
_COMBINED: tuple[tuple[tuple[str, ...], Callable[[Any], Any]], ...] = (
    (("updates", "version", "snapshots"), min),
    (("refused", "seconds", "waited_s"), max),
    (("bytes_in", "bytes_out", "duplicates", "superseded", "snapshot_failures", "server_restarts"), sum),
)

# A server that was started again counts on from a number that its predecessor cannot have reached, so that
# "not modified" is never said of weights that went back to a snapshot.
_INCARNATION_BITS = 40


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


class Counters:
    """Numbers that only grow, counted by many threads: ``waited_s`` for slower workers, and whole ones."""

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
    """Adds several counts up by name.

    >>> added_up([{"10.0.0.7": 2}, {"10.0.0.9": 1, "10.0.0.7": 1}])
    {'10.0.0.7': 3, '10.0.0.9': 1}
    """
    return dict(sum(map(Counter, counts), Counter()))


class SharedLock:
    """A lock that many may share; who wants it alone goes before those who come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False
        self._wanted = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Waits until nobody has, or wants, the gate alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._wanted)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Waits until all who are inside have left, and lets nobody else in meanwhile."""
        with self._changed:
            self._wanted += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._inside)
                self._alone = True
            finally:
                self._wanted -= 1
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class ParameterServer:
    """Weights, ledger, clock and counters of one server, and what holds them together."""

    def __init__(self, spec: ServerSpec, image: SnapshotImage, incarnation: int = 0) -> None:
        rule = rule_of(spec.rule, spec.layout)
        slots = image.slots or rule.init(spec.num_values)
        if len(slots) != len(rule.slots):
            raise ConfigurationError(
                f"slots: expected {len(rule.slots)} for the rule {spec.rule!r}. Received: {len(slots)}."
            )
        self.spec = spec
        self.incarnation = incarnation
        self.store = Store(rule, image.values, slots, first_value=spec.first_value, locked=spec.locked)
        self.push_log = PushLog({partition: Entry(**entry) for partition, entry in image.entries.items()})
        self.averages = Averages(image.state, image.contributions)
        self.clock = Clock(spec.max_staleness)
        self.staleness = Staleness(image.staleness)
        self.counters = Counters(image.counts)
        self.shared_lock = SharedLock()
        self.failure: str | None = None
        self.stopped = image.stopped
        self.updates = image.updates
        self._began = image.iterations
        self._applied = image.iterations
        self._rate = image.rate
        self._started = time.monotonic()
        self._counting = threading.Lock()
        self._on_update: Callable[[], None] = lambda: None

    @property
    def version(self) -> int:
        """Number of the weights as they are, never zero; it grows with every push that has been applied."""
        return (self.incarnation << _INCARNATION_BITS) + self.updates + 1

    @property
    def rate(self) -> float:
        """The learning rate of the next update; NaN where there is none."""
        return self.store.rule.rate(self._applied) if self._rate is None else self._rate

    @property
    def iterations(self) -> int:
        """Updates that the optimizer has made, in this fit and before it."""
        return self._applied

    @property
    def flags(self) -> Flags:
        """Flags of every reply."""
        return Flags.STOP if self.stopped else Flags.NONE

    def on_update(self, notify: Callable[[], None]) -> None:
        """Names what is to be called after each push that was applied."""
        self._on_update = notify

    def settle(self, push: RequestHeader, update: np.ndarray, *, finite: bool) -> Status:
        """Applies a push unless that was done before, or it is not this worker's to send, or it is not finite.

        Args:
            update: Float32 of shape (num_values,), whole; it is overwritten.
        """
        with self.shared_lock.shared():
            status = self.push_log.begin(push.partition, push.attempt, push.place)
            if status is not Status.OK:
                self.counters.add("duplicates" if status is Status.DUPLICATE else "superseded")
                return status
            try:
                if finite:
                    self._apply(push.partition, update)
                else:
                    status = self._refuse(push)
            except Exception as error:
                # Some stripes have the update and others do not.
                self.fail(f"Expected an update to be applied whole. Received: {type(error).__name__}: {error}.")
                raise
            finally:
                self.push_log.finish(push.partition, push.place)
        self.clock.advance(push.partition, push.step)
        self._on_update()
        return status

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the updates to come; NaN goes back to the rule's own."""
        self._rate = None if math.isnan(rate) else rate

    def stop(self) -> None:
        """Tells all workers, with the next reply, that the fit is to end."""
        self.stopped = True
        self.clock.release()

    def fail(self, reason: str) -> None:
        """Gives the fit up: every further request gets the reason."""
        self.failure = self.failure or reason
        self.clock.release()

    def image(self) -> SnapshotImage:
        """Returns the contents of a snapshot. The gate must be held, and the vectors are the server's own."""
        return SnapshotImage(
            values=self.store.values,
            slots=self.store.slots,
            state=self.averages.average(),
            iterations=self._applied,
            updates=self.updates,
            entries={partition: dataclasses.asdict(entry) for partition, entry in self.push_log.entries().items()},
            contributions=self.averages.contributions(),
            rate=self._rate,
            stopped=self.stopped,
            counts=self.counters.values(),
            staleness=self.staleness.histogram(),
        )

    def statistics(self) -> dict[str, Any]:
        """Returns the counts of this server; the positions are the last step of each partition."""
        return {
            **self.counters.values(),
            "updates": self.updates,
            "iterations": self._applied,
            "version": self.version,
            "server_restarts": self.incarnation,
            "failure": self.failure and self.failure[:TEXT_BYTES],
            "staleness": self.staleness.histogram(),
            "seconds": time.monotonic() - self._started,
            "positions": {str(partition): entry.step for partition, entry in self.push_log.entries().items()},
            "live": self.clock.live(),
        }

    def _apply(self, partition: int, update: np.ndarray) -> None:
        rule, spec = self.store.rule, self.spec
        with self._counting:
            iteration, self._began = self._began, self._began + 1
            staleness = self.staleness.of_push(partition, self.updates)
        if spec.num_values == spec.layout.num_values:
            rule.prepare(update, spec.layout)
        factor = 1 / (staleness + 1) if spec.divide_by_staleness else 1.0
        self.store.apply(rule.begin(iteration, self._rate), update, factor)
        with self._counting:
            self._applied += 1
            self.updates += 1

    def _refuse(self, push: RequestHeader) -> Status:
        refused = int(self.counters.add("refused"))
        if refused > self.spec.max_refused:
            self.fail(
                f"Expected updates of finite numbers. Received: {refused} with NaN or infinities, the last in step "
                f"{push.step} of partition {push.partition}; {self.spec.max_refused} are allowed. Lower the learning "
                "rate, clip gradients, or look for rows with NaN."
            )
        return Status.REFUSED
