"""What ranks say, written down where it is heard, to be read elsewhere later.

A rank that hosts what the driver hosts otherwise hears all that the driver would hear.
Its record comes to the driver with the results of the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from elephant.monitor.events import (
    LIMITS,
    EpochEnded,
    EpochPart,
    Event,
    Finished,
    Printed,
    RankFailure,
    RankGone,
    RunNote,
    Started,
    StateSaved,
    StepEnded,
    from_message,
    to_message,
)
from elephant.net.frames import HEADER_BYTES, decode, decode_header, encode

_MAX_PRINTED = 500
_NOT_RECORDED = (EpochPart, Finished)


class EventLog:
    """Takes a run's events where `elephant.monitor.progress.Progress` would show them.

    Of steps within an epoch, each rank's last one is kept; of states to go on from, the newest; of what ranks
    print, the first 500 batches of lines.

    Attributes:
        ended: The ranks that have nothing more to say.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._steps: dict[int, StepEnded] = {}
        self._state: StateSaved | None = None
        self._printed = 0
        self._epoch_began = time.monotonic()
        self.ended: set[int] = set()

    def show(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Finished | RankFailure | RankGone):
            self.ended.add(event.rank)
        if isinstance(event, Started):
            self._epoch_began = time.monotonic()
        if isinstance(event, EpochEnded):
            event = self._timed(event)
        if isinstance(event, StepEnded):
            self._steps[event.rank] = event
        elif isinstance(event, Printed):
            self._printed += 1
            if self._printed <= _MAX_PRINTED:
                self._events.append(event)
        elif isinstance(event, StateSaved):
            self._state = event
        elif not isinstance(event, _NOT_RECORDED):
            self._events.append(event)

    def _timed(self, epoch: EpochEnded) -> EpochEnded:
        now = time.monotonic()
        seconds, self._epoch_began = now - self._epoch_began, now
        return replace(epoch, seconds=seconds)

    def note(self, text: str) -> None:
        """Takes a line about the run as a whole."""
        self._events.append(RunNote(rank=0, text=text))

    def to_bytes(self) -> bytes:
        """Returns the record as it travels: frames, one after the other."""
        # Before the rest, where a failure looks for the step that its rank was in.
        return packed([*self._steps.values(), *([] if self._state is None else [self._state]), *self._events])


def packed(events: Sequence[Event]) -> bytes:
    """Returns events as frames, one after the other."""
    return b"".join(b"".join(encode(to_message(event))) for event in events)


def unpacked(record: bytes) -> list[Event]:
    """Returns the events of `packed`; raises ProtocolError when there is something else."""
    events, view = [], memoryview(record)
    while len(view):
        header = decode_header(bytes(view[:HEADER_BYTES]), LIMITS)
        size = HEADER_BYTES + header.manifest_bytes + header.payload_bytes
        events.append(from_message(decode(view[:size], LIMITS), recorded=True))
        view = view[size:]
    return events
