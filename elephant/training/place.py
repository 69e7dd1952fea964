"""Where in the fit a worker that trains at its own pace is: batches counted from one over all epochs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Place:
    """The batch that a worker is at.

    Args:
        steps: Batches of an epoch.

    Attributes:
        first: The batch of the present epoch that this worker began with: zero, unless it
            goes on where another attempt, or a server that was started again, had got to.
        epoch: The epoch, from zero.
        batch: The batch of it, from zero; ``first - 1`` before the first one.

    >>> place = Place(steps=10)
    >>> place.epoch, place.batch = 2, 0
    >>> place.number
    21
    """

    steps: int
    first: int = 0
    epoch: int = 0
    batch: int = -1

    @property
    def number(self) -> int:
        """The batch's number over the whole fit, from one."""
        return self.epoch * self.steps + self.batch + 1

    @property
    def taken(self) -> int:
        """Batches of the epoch that this worker has begun since it came here."""
        return self.batch + 1 - self.first

    @property
    def ends_epoch(self) -> bool:
        """Whether the batch is the epoch's last one."""
        return self.batch + 1 == self.steps
