"""Generations of a fit's ranks: after a loss, all begin again from the last common state, within the same Spark job.

The tasks stay, and with them the rows and the processes that have imported Keras; Spark runs a lost task again. Where
that is of no help, the fit ends with its error, and may be started again as a whole
(`elephant.driver.recovery.restarts`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from elephant.checkpoint.state import FitState
from elephant.errors import ElephantError, TrainingError
from elephant.monitor.events import Event, Started, StateNeeded, StepEnded, TaskSilent
from elephant.monitor.meetings import Meetings
from elephant.monitor.record import FitRecord

# The factor by which the wait for a task is longer, at most.
_LONGER = 1.5


class Recovering(Protocol):
    """Decides whether a fit goes on after a loss, and from where; see `elephant.driver.recovery.restarts.Recovery`."""

    @property
    def state(self) -> FitState | None:
        """State that ranks have gone on from last; None where they have begun."""

    def goes_on_after(self, error: TrainingError) -> bool:
        """Returns whether the fit goes on after an error; counts it."""

    def find_state(self) -> FitState | None:
        """Returns the state to go on from, which `state` is from here on."""


class RankChannel(Protocol):
    """Speaks to tasks and ranks; see `elephant.monitor.channel.Channel`."""

    meetings: Meetings

    def send_state(self, state: FitState) -> None:
        """Sends rank 0 the state that all ranks go on from."""


class EarlierTurns(Protocol):
    """Callbacks on the driver; see `elephant.driver.driver_turns.SynchronousEpochs`."""

    def begin_again(self, state: FitState | None) -> None:
        """Has callbacks remember what they did in a state of before."""


class Generations:
    """Calls the tasks of a fit's ranks to another meeting after a loss.

    Args:
        ranks: The first rank of each task.
        slots_s: How long a task may be missing.
        end_attempt: Called with the number of an attempt at a task, to end it; returns whether that is possible.

    Attributes:
        recoveries: What each loss has cost, in seconds by phase, and in steps.
    """

    def __init__(
        self,
        channel: RankChannel,
        recovering: Recovering,
        turns: EarlierTurns | None,
        *,
        ranks: Sequence[int],
        slots_s: float,
        end_attempt: Callable[[int], bool],
    ) -> None:
        self._channel = channel
        self._recovering = recovering
        self._turns = turns
        self._ranks = ranks
        self._end_attempt = end_attempt
        self.recoveries: list[dict[str, Any]] = []
        # Those of the loss that ranks have not come back from yet.
        self._loss: dict[str, Any] | None = None
        # Two fits that each have a part of the slots are not to let go of them at the same moment.
        self._patience_s = slots_s * random.uniform(1.0, _LONGER)
        self._since = 0.0
        self._reached = 0

    @property
    def are_awaited(self) -> bool:
        """True if a loss was counted after which the ranks have not met yet."""
        return self._channel.meetings.generation > 0 and not self._channel.meetings.is_over

    def begin_after(self, error: ElephantError, record: FitRecord) -> bool:
        """Has the ranks begin again after an error, where that helps; returns whether they do."""
        meetings = self._channel.meetings
        if isinstance(record.silent, TaskSilent) and not self._end_attempt(record.silent.attempt):
            return False
        if not meetings.is_over:
            # Nobody has begun that would have to begin again: the others wait for the task that was lost.
            return isinstance(record.silent, TaskSilent)
        if not isinstance(error, TrainingError) or not self._recovering.goes_on_after(error):
            return False
        steps = [failure.step for failure in record.failures if failure.step is not None]
        self._reached = max(self._reached, *steps, *record.next_steps.values(), 0)
        self._since = time.monotonic()
        # Ranks that are lost before the others have come back make the loss before a longer one.
        began = time.time() if self._loss is None else self._loss["at"]
        self._loss = {"at": began, "rank": getattr(error, "rank", None)}
        state = self._recovering.find_state()
        meetings.begin_again(goes_on=state is not None)
        if self._turns is not None:
            self._turns.begin_again(state)
        self._end_phase("told_s")
        return True

    def _end_phase(self, name: str) -> None:
        if self._loss is not None and name not in self._loss:
            now = time.monotonic()
            self._loss[name], self._since = now - self._since, now

    def add(self, event: Event, record: FitRecord) -> None:
        """Takes an event of the ranks: sends them the state, and counts what the loss has cost."""
        if isinstance(event, StateNeeded):
            self._end_phase("processes_s")
            state = self._recovering.state
            if state is not None:
                self._channel.send_state(state)
            self._end_phase("state_s")
        elif isinstance(event, Started) and self._loss is not None:
            self._end_phase("model_s")
            if event.first_step is not None:
                self._loss["steps_again"] = max(self._reached - event.first_step, 0)
        elif isinstance(event, StepEnded) and self._loss is not None:
            self._end_phase("step_s")
            self._loss["resumed_at"] = time.time()
            self.recoveries.append(self._loss)
            self._loss = None

    def check(self) -> None:
        """Raises TrainingError where a task has been missing for too long: there is no slot for it, or Spark does not
        run it again. As a whole the fit waits for slots, which it holds meanwhile for nobody."""
        missing, since = self._channel.meetings.absent(self._ranks)
        waited_s = time.monotonic() - since
        if len(missing) == len(self._ranks) or waited_s <= self._patience_s:
            return
        error = TrainingError(
            f"expected the tasks of all {len(self._ranks)} workers, which take every step together. Received: nothing "
            f"of {len(missing)} of them for {waited_s:.0f} s, the first of which is rank {missing[0]}'s. The cluster "
            "has fewer free task slots than numWorkers, or Spark does not run a lost task again. Free some, or "
            "raise timeouts={'slots_s': ...}."
        )
        error.retryable = error.is_counted = True
        raise error

    def release(self) -> None:
        """Tells the tasks that all is done."""
        self._channel.meetings.release()
