"""Moments within an epoch at which ranks that take every step together keep their state: the same step on all."""

from __future__ import annotations

import math
import time

import numpy as np

from elephant.collective.communicator import Communicator
from elephant.rank.rank_progress import RankWeight

# As long as nobody asks, who wants a state waits.
_LONGEST_PAUSE_S = 0.5


class CheckpointMoments:
    """Says after which steps there is to be a state: about every few seconds by the clock of rank 0.

    Clocks of ranks differ, and to gather a state takes all of them. So they ask each other, in one small allreduce,
    after a step that they have agreed on the last time: rank 0 says whether it is time, and in how many steps to ask
    again. That is never later than half of what is left by the time that steps have taken, so that a moment is met
    within a step or two, though steps may become slower; and never later than in half a second, because somebody may
    want one.

    Args:
        seconds: Between two states; None makes none by the clock.
        communicator: All ranks.
        weight: Its ``pause`` ends runs of steps where the ranks ask.
        every: Steps after which ranks have equal weights; one where they always have.

    Attributes:
        someone_leaves: Whether a rank was asked to end, when all have asked each other last.
    """

    def __init__(
        self, seconds: float | None, communicator: Communicator, weight: RankWeight, *, every: int = 1
    ) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._communicator = communicator
        self._weight = weight
        self._every = every
        self._kept_at = time.monotonic()
        self.someone_leaves = False

    def begin_epoch(self) -> None:
        """Counts the steps of an epoch that begins."""
        self._asked = (self._weight.step, time.monotonic())
        self._ask_in(1)

    def _ask_in(self, steps: int) -> None:
        asked = self._asked[0] + steps
        self._weight.pause = -(-asked // self._every) * self._every

    def is_due(self, done: int, *, is_free: bool, is_wanted: bool, leaves: bool) -> bool:
        """Returns whether to keep the state after so many steps of the epoch; all ranks call it after each run.

        Args:
            is_free: Whether this rank can take one; rank 0's last one may still be on its way.
            is_wanted: Whether somebody wants one, as far as this rank knows.
            leaves: Whether this rank was asked to end.
        """
        asks = self._weight.pause <= done < self._weight.plan.steps
        return asks and self._agree(done, is_free=is_free, is_wanted=is_wanted, leaves=leaves)

    def is_due_at_end(self, *, is_wanted: bool, leaves: bool) -> bool:
        """Returns whether to keep the state at the end of an epoch, whatever else asks for it; all ranks call it."""
        return self._agree(self._weight.step + 1, is_free=True, is_wanted=is_wanted, leaves=leaves)

    def _agree(self, done: int, *, is_free: bool, is_wanted: bool, leaves: bool) -> bool:
        now, (before, asked_at) = time.monotonic(), self._asked
        left = self._kept_at + self._seconds - now
        step_s = max(now - asked_at, 1e-6) / max(done - before, 1)
        in_steps = max(1, int(min(left / 2 if left > 0 else self._seconds, _LONGEST_PAUSE_S) / step_s))
        is_first = self._communicator.rank == 0
        is_due = is_wanted or leaves or (is_first and left <= 0 and is_free)
        answer = np.array([is_due, in_steps * is_first, leaves], np.int64)
        if self._communicator.world_size > 1:
            self._communicator.allreduce_(answer, "max")
        self._asked = (done, now)
        self._ask_in(int(answer[1]))
        self.someone_leaves = bool(answer[2])
        return bool(answer[0])

    def end_turn(self) -> None:
        """Counts the seconds from now on: a state was kept."""
        self._kept_at = time.monotonic()
