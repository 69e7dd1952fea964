"""Moments within an epoch at which ranks that take every step together keep their state: the same step on all."""

from __future__ import annotations

import math
import time

import numpy as np

from elephant.collective.communicator import Communicator
from elephant.rank.rank_progress import RankWeight

# As long as nobody asks, who wants a state waits.
_LONGEST_PAUSE_S = 0.5
# Of states for the driver's memory: at least so far apart, and so many times what they cost. Sending goes on beside
# training, and takes a part of a core.
_MEMORY_S, _MEMORY_STEPS = 1.0, 50
_STOOD_FACTOR, _SENT_FACTOR = 50, 10


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
        in_memory: Whether there are to be more states, for the driver's memory: after a second or 50 steps, whichever
            is more, or so seldom that they cost a few percent of the time.

    Attributes:
        someone_leaves: Whether a rank was asked to end, when all have asked each other last.
    """

    def __init__(
        self,
        seconds: float | None,
        communicator: Communicator,
        weight: RankWeight,
        *,
        every: int = 1,
        in_memory: bool = False,
    ) -> None:
        self._longest_s = math.inf if seconds is None else seconds
        self._in_memory = in_memory
        # What the last state has cost: seconds in which training stood still, and until its arrays had been sent.
        self._stood_s = self._sent_s = 0.0
        self._is_sending = False
        self._communicator = communicator
        self._weight = weight
        self._every = every
        self._kept_at = time.monotonic()
        self._end_kept_at = -math.inf
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
        """Returns whether to keep the state at the end of an epoch, whatever else asks for it; all ranks call it.

        One for the driver's memory is due where that of the last epoch's end is older than it may be.
        """
        is_old = self._in_memory and time.monotonic() - self._end_kept_at >= max(_MEMORY_S, self._costs_s)
        is_due = self._agree(self._weight.step + 1, is_free=True, is_wanted=is_wanted or is_old, leaves=leaves)
        self._end_kept_at = time.monotonic() if is_due else self._end_kept_at
        return is_due

    def _agree(self, done: int, *, is_free: bool, is_wanted: bool, leaves: bool) -> bool:
        now, (before, asked_at) = time.monotonic(), self._asked
        step_s = max(now - asked_at, 1e-6) / max(done - before, 1)
        if self._is_sending and is_free:
            self._is_sending, self._sent_s = False, now - self._kept_at
        seconds = self._seconds_between(step_s)
        left = self._kept_at + seconds - now
        in_steps = max(1, int(min(left / 2 if left > 0 else seconds, _LONGEST_PAUSE_S) / step_s))
        is_first = self._communicator.rank == 0
        is_due = is_wanted or leaves or (is_first and left <= 0 and is_free)
        answer = np.array([is_due, in_steps * is_first, leaves], np.int64)
        if self._communicator.world_size > 1:
            self._communicator.allreduce_(answer, "max")
        self._asked = (done, now)
        self._ask_in(int(answer[1]))
        self.someone_leaves = bool(answer[2])
        return bool(answer[0])

    def _seconds_between(self, step_s: float) -> float:
        """Returns how far states are apart, where a step takes so long."""
        if not self._in_memory:
            return self._longest_s
        return min(max(_MEMORY_S, _MEMORY_STEPS * step_s, self._costs_s), self._longest_s)

    @property
    def _costs_s(self) -> float:
        return max(_STOOD_FACTOR * self._stood_s, _SENT_FACTOR * self._sent_s)

    def end_turn(self, began: float) -> None:
        """Counts the seconds from now on: a state was kept, which training has stood still for since a moment."""
        self._kept_at = time.monotonic()
        self._stood_s, self._is_sending = self._kept_at - began, True
