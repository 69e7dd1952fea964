"""Parameter-server state machine, without I/O: applies pushes by themselves or in rounds, and keeps count."""

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
from elephant.parameter_server.rounds import Rounds
from elephant.parameter_server.staleness import Clock, Staleness
from elephant.parameter_server.store import Averages, SnapshotImage, Store
from elephant.parameter_server.tables import ServedTables
from elephant.tables.stack import TableContribution

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
        self.tables = image.tables or ServedTables(spec)
        self.clock = Clock(spec.max_staleness)
        self.rounds: Rounds | None = None
        if spec.rounds_from is not None:
            self.rounds = Rounds(spec.num_partitions, spec.num_values, spec.rounds_from, self.push_log.entries())
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

    def settle(
        self, push: RequestHeader, update: np.ndarray, *, finite: bool, contribution: TableContribution | None = None
    ) -> Status:
        """Applies a push unless that was done before, or it is not this worker's to send, or it is not finite.

        Args:
            update: Float32 of shape (num_values,), whole; it is overwritten.
            contribution: To rows of tables, which are updated with it.
        """
        with self.shared_lock.shared():
            status = self.push_log.begin(push.partition, push.attempt, push.place)
            if status is not Status.OK:
                self.counters.add("duplicates" if status is Status.DUPLICATE else "superseded")
                return status
            try:
                if not finite:
                    status = self._refuse(push)
                if self.rounds is not None:
                    entry = self.push_log.of(push.partition)
                    self.rounds.add(push.partition, push.step, push.rate if finite else 0.0, update, entry)
                elif finite:
                    self._apply(push.partition, update, contribution)
            except Exception as error:
                # Some stripes have the update and others do not.
                self.fail(f"Expected an update to be applied whole. Received: {type(error).__name__}: {error}.")
                raise
            finally:
                self.push_log.finish(push.partition, push.place)
        self.clock.advance(push.partition, push.step)
        if self.rounds is None:
            self._on_update()
        else:
            self.end_round()
        return status

    def end_round(self) -> None:
        """Applies the open round if it is complete; to be called whenever it may have become so."""
        rounds = self.rounds
        if rounds is None or self.stopped:
            return
        with self.shared_lock.shared():
            mean = rounds.take()
            if mean is None:
                return
            try:
                if len(mean):
                    self._apply_update(mean)
            except Exception as error:
                self.fail(f"Expected a round to be applied whole. Received: {type(error).__name__}: {error}.")
                raise
            rounds.close()
        self._on_update()

    def open_epochs(self, count: int) -> None:
        """Lets the rounds of the first epochs be applied."""
        if self.rounds is not None:
            self.rounds.open_epochs(count)
            self.end_round()

    def enter(self, partition: int, entry: Entry) -> None:
        """Notes a worker that has connected, and what the log has of its partition."""
        self.clock.enter(partition, entry.step)
        if self.rounds is not None:
            self.rounds.enter(partition, entry.epoch_steps or 0, entry.step)
            self.end_round()

    def finish(self, partition: int) -> None:
        """Notes that a worker has done all of its steps."""
        self.clock.finish(partition)
        if self.rounds is not None:
            self.rounds.finish(partition)
            self.end_round()

    def wait(self, partition: int, timeout_s: float, given_up: Callable[[], bool]) -> bool:
        """Waits until a worker may go on; returns whether the wait has ended before its time."""
        turn = self.clock if self.rounds is None else self.rounds
        return turn.wait(partition, timeout_s, given_up)

    def _release(self) -> None:
        self.clock.release()
        if self.rounds is not None:
            self.rounds.release()

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the updates to come; NaN goes back to the rule's own."""
        self._rate = None if math.isnan(rate) else rate

    def stop(self) -> None:
        """Tells all workers, with the next reply, that the fit is to end."""
        self.stopped = True
        self._release()

    def fail(self, reason: str) -> None:
        """Gives the fit up: every further request gets the reason."""
        self.failure = self.failure or reason
        self._release()

    def image(self) -> SnapshotImage:
        """Returns the contents of a snapshot. The gate must be held, and the vectors are the server's own."""
        return SnapshotImage(
            values=self.store.values,
            slots=self.store.slots,
            state=self.averages.average(),
            iterations=self._applied,
            updates=self.updates,
            entries={partition: dataclasses.asdict(entry) for partition, entry in self._applied_entries().items()},
            contributions=self.averages.contributions(),
            rate=self._rate,
            stopped=self.stopped,
            counts=self.counters.values(),
            staleness=self.staleness.histogram(),
            tables=self.tables,
        )

    def _applied_entries(self) -> dict[int, Entry]:
        """Returns the entries of the log, without the pushes that wait for the end of their round."""
        entries = self.push_log.entries()
        for partition, known in ({} if self.rounds is None else self.rounds.unapplied()).items():
            entries[partition] = dataclasses.replace(known, attempt=entries[partition].attempt)
        return entries

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

    def _apply(self, partition: int, update: np.ndarray, contribution: TableContribution | None) -> None:
        with self._counting:
            staleness = self.staleness.of_push(partition, self.updates)
        factor = 1 / (staleness + 1) if self.spec.divide_by_staleness else 1.0
        if contribution is not None:
            self.tables.update(contribution, factor)
        self._apply_update(update, factor)

    def _apply_update(self, update: np.ndarray, factor: float = 1.0) -> None:
        rule, spec = self.store.rule, self.spec
        with self._counting:
            iteration, self._began = self._began, self._began + 1
        if spec.num_values == spec.layout.num_values:
            rule.prepare(update, spec.layout)
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
