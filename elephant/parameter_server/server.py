"""Parameter-server state machine, without I/O: applies pushes, answers pulls, tracks staleness."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError
from elephant.parameter_server.layout import ServerSpec
from elephant.parameter_server.optimizers import rule_of
from elephant.parameter_server.protocol import TEXT_BYTES, Flags, RequestHeader, Status
from elephant.parameter_server.push_log import Entry, PushLog
from elephant.parameter_server.snapshot import SnapshotImage
from elephant.parameter_server.staleness import Clock, Staleness
from elephant.parameter_server.statistics import Counters
from elephant.parameter_server.store import Averages, Store

# A server that was started again counts on from a number that its predecessor cannot have reached, so that
# "not modified" is never said of weights that went back to a snapshot.
_INCARNATION_BITS = 40


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
    """Weights, ledger, clock and counters of one server, and what holds them together.

    Args:
        spec: What to keep.
        image: What to begin with; its vectors are changed in place.
        incarnation: How often the server was started again.
    """

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
        """What every reply says."""
        return Flags.STOP if self.stopped else Flags.NONE

    def on_update(self, notify: Callable[[], None]) -> None:
        """Names what is to be called after each push that was applied."""
        self._on_update = notify

    def settle(self, push: RequestHeader, update: np.ndarray, *, finite: bool) -> Status:
        """Applies a push unless that was done before, or it is not this worker's to send, or it is not finite.

        Args:
            push: Its header.
            update: Float32 of shape (num_values,), whole; it is overwritten.
            finite: Whether every value is a number, here and in the parts of other servers.
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
        """Returns what a snapshot keeps. The gate must be held, and the vectors are the server's own."""
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
