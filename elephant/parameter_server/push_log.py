"""Exactly once: which push of each partition was the last to be applied, and who may push for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elephant.parameter_server.protocol import Status

Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Known steps of one partition.

    Args:
        attempt: The newest attempt that has said HELLO.
        step: Last step that was settled; zero before the first.
        call: ... and the last call of that step.
        highest_call: The highest call of any step so far.
        epoch_steps: Steps of the partition's epoch, for rounds; None where nobody has said them.
    """

    attempt: int = 0
    step: int = 0
    call: int = 0
    highest_call: int = 0
    epoch_steps: int | None = None

    @property
    def place(self) -> Place:
        """Step and call."""
        return self.step, self.call


class PushLog:
    """One entry for each partition that has come, and the push of it that is being settled at present.

    Pushes of one partition are settled one after the other: what is sent again over a new
    connection waits for what the old one had begun, and is then known to be a duplicate.

    >>> push_log = PushLog()
    >>> push_log.register(0, attempt=7).place, push_log.begin(0, 7, (1, 0)).name
    ((0, 0), 'OK')
    >>> push_log.finish(0, (1, 0)), push_log.begin(0, 7, (1, 0)).name, push_log.begin(0, 6, (2, 0)).name
    (None, 'DUPLICATE', 'SUPERSEDED')
    """

    def __init__(self, entries: Mapping[int, Entry] | None = None) -> None:
        self._entries = dict(entries or {})
        self._settling: set[int] = set()
        self._changed = threading.Condition()

    def register(self, partition: int, attempt: int, epoch_steps: int | None = None) -> Entry | None:
        """Notes the attempt of a worker that says HELLO, and the steps of its epoch where these matter.

        Returns:
            What is settled of its partition, or None where a newer attempt has come before.
        """
        with self._changed:
            known = self._entries.get(partition, Entry())
            if attempt < known.attempt:
                return None
            # From here on the attempts before it are refused, so one push at most is waited for.
            self._entries[partition] = replace(known, attempt=attempt, epoch_steps=epoch_steps)
            self._wait(partition)
            return self._entries[partition]

    def is_superseded(self, partition: int, attempt: int) -> bool:
        """Returns whether a newer attempt of the partition has said HELLO."""
        return attempt < self._entries.get(partition, Entry()).attempt

    def of(self, partition: int) -> Entry:
        """Returns the entry of a partition, an empty one where nothing has come."""
        return self._entries.get(partition, Entry())

    def begin(self, partition: int, attempt: int, place: Place) -> Status:
        """Decides about a push: OK to apply it, and to call ``finish`` then; DUPLICATE or SUPERSEDED."""
        with self._changed:
            self._wait(partition)
            known = self._entries.get(partition, Entry())
            if attempt < known.attempt:
                return Status.SUPERSEDED
            if place <= known.place:
                return Status.DUPLICATE
            self._settling.add(partition)
            return Status.OK

    def finish(self, partition: int, place: Place) -> None:
        """Notes that the push that was begun has been settled."""
        with self._changed:
            self._settling.discard(partition)
            known = self._entries.get(partition, Entry())
            self._entries[partition] = replace(
                known, step=place[0], call=place[1], highest_call=max(known.highest_call, place[1])
            )
            self._changed.notify_all()

    def entries(self) -> dict[int, Entry]:
        """Returns all entries, by partition."""
        with self._changed:
            return dict(self._entries)

    def _wait(self, partition: int) -> None:
        self._changed.wait_for(lambda: partition not in self._settling)
