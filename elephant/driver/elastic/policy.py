"""Policy of an elastic fit: how many workers an attempt begins with, and what a loss or a free slot changes.

It decides from numbers alone, and keeps the few that it needs; `elephant.driver.elastic.fit` looks and acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

# Losses one after the other without a newer state, where none were counted out for the fit.
FRUITLESS_LOSSES = 3


class Action(Enum):
    """Answer of the policy before an attempt."""

    WAIT = auto()  # for more slots, and ask again
    START = auto()
    GIVE_UP = auto()


@dataclass(frozen=True)
class Decision:
    """Answer of the policy before an attempt, with the number of workers to start with."""

    action: Action
    workers: int = 0


class ElasticPolicy:
    """Number of workers of one fit, from its begin to its end.

    A fit begins as soon as there are slots for the fewest workers, with as many as there are. After a loss it waits for
    as many as it had, since most clusters replace what they lose, and after ``slots_s`` goes on with fewer. It grows at
    the end of an epoch, when slots are free; that is no restart.

    Args:
        least: The fewest workers.
        most: The most.
        slots_s: Seconds that the fit waits for slots, before it goes on with fewer.
        least_s: Seconds that it waits for those of the fewest workers, before it ends; None takes ``slots_s``.
        max_restarts: Losses that the fit goes on after; 0 does not count those after which it has come further, and
            ends it with the third loss in a row without.

    Attributes:
        workers: Of the present attempt; None before the first.
        restarts: Losses so far.

    >>> policy = ElasticPolicy(2, 4, slots_s=30)
    >>> policy.before_attempt(3, waited_s=0).workers
    3
    >>> policy.goes_on_after_loss(came_further=True), policy.before_attempt(2, waited_s=5).action.name
    (True, 'WAIT')
    >>> policy.before_attempt(2, waited_s=31).workers, policy.grows_after_epoch(4)
    (2, True)
    """

    def __init__(
        self, least: int, most: int, *, slots_s: float, least_s: float | None = None, max_restarts: int = 0
    ) -> None:
        self.least = least
        self.most = most
        self.workers: int | None = None
        self.restarts = 0
        self._slots_s = slots_s
        self._least_s = slots_s if least_s is None else least_s
        self._max_restarts = max_restarts
        self._fruitless = 0
        # Below which the next attempt waits.
        self._awaited = least

    def before_attempt(self, slots: int, *, waited_s: float, are_coming: bool = False) -> Decision:
        """Returns the next action before an attempt; asked again and again, as long as that is to wait.

        Args:
            slots: Task slots that are free for this fit.
            waited_s: Seconds since it was asked first.
            are_coming: Whether more are just being started.
        """
        enough = slots >= self._awaited and (slots >= self.most or not are_coming)
        if not enough and waited_s < (self._slots_s if slots >= self.least else self._least_s):
            return Decision(Action.WAIT)
        if slots < self.least:
            return Decision(Action.GIVE_UP)
        self.workers = min(slots, self.most)
        self._awaited = self.least
        return Decision(Action.START, self.workers)

    def goes_on_after_loss(self, *, came_further: bool) -> bool:
        """Returns whether the fit starts again after a loss, of one worker or of all, which it counts.

        Args:
            came_further: Whether there is a newer state than that which the attempt went on from.
        """
        self._fruitless = 0 if came_further else self._fruitless + 1
        ends = self.restarts >= self._max_restarts if self._max_restarts else self._fruitless >= FRUITLESS_LOSSES
        if ends:
            return False
        self.restarts += 1
        self._awaited = max(self.workers or 0, self.least)
        return True

    def goes_on_with_fewer(self) -> None:
        """Takes note that ranks have waited for a lost one already, which does not come."""
        self._awaited = self.least

    def grows_after_epoch(self, slots: int) -> bool:
        """Returns whether to start again with more workers, at the end of an epoch.

        Args:
            slots: Task slots that are free for this fit, with those that it has.
        """
        return self.workers is not None and min(slots, self.most) > self.workers
