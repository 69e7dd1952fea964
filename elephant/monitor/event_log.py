"""Log of the events of a run whose coordinator is beside rank 0; it comes to the driver with the results of the run."""

from __future__ import annotations

from elephant.monitor.events import Event, Logged, RunNote, packed
from elephant.monitor.record import FitRecord

_MOST = 500


class EventLog:
    """Takes a run's events where `elephant.monitor.progress.Progress` would show them.

    Which ones it keeps, their classes say (`elephant.monitor.events.Logged`).

    Attributes:
        record: What the events say together.
    """

    def __init__(self) -> None:
        self.record = FitRecord()
        self._events: list[Event] = []
        self._last: dict[tuple[type[Event], int], Event] = {}
        self._counts: dict[type[Event], int] = {}

    def show(self, event: Event) -> None:
        """Takes an event."""
        event = self.record.add(event)
        kind = type(event)
        if event.logged is Logged.LAST:
            self._last[kind, event.rank] = event
            return
        if event.logged is Logged.FIRST:
            self._counts[kind] = self._counts.get(kind, 0) + 1
        if event.logged is not Logged.NONE and self._counts.get(kind, 0) <= _MOST:
            self._events.append(event)

    def note(self, text: str) -> None:
        """Takes a line about the run as a whole."""
        self.show(RunNote(text=text))

    def awaits(self, text: str) -> None:
        """Does nothing: when the log is read, nothing is waited for."""

    def to_bytes(self) -> bytes:
        """Returns the log as it travels: frames, one after the other."""
        # Steps come before the rest, where a failure looks for the one that its rank was in.
        return packed([*self._last.values(), *self._events])
