"""Position of a worker in its epochs, weight of a rank in an average, and times of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elephant.data.epoch_plan import EpochPlan
from elephant.monitor.events import RankTrace
from elephant.monitor.trace import MOST_STEPS, PROCESS, STEPS_AT_ENDS
from elephant.rank.input.feed import BatchFeed
from elephant.rank.job import ExchangeCounts, StepReporter
from elephant.rank.process_pipe import begin_step

# Callbacks that end an epoch more quickly are not worth telling.
_SHORT_S = 1e-4


@dataclass
class TrainingPosition:
    """The batch that a worker is at.

    Args:
        steps: Batches of an epoch.

    Attributes:
        first: The batch of the present epoch that this worker began with: zero, unless it
            goes on where another attempt, or a server that was started again, had got to.
        epoch: The epoch, from zero.
        batch: The batch of it, from zero; ``first - 1`` before the first one.

    >>> place = TrainingPosition(steps=10)
    >>> place.epoch, place.batch = 2, 0
    >>> place.number
    21
    """

    steps: int
    first: int = 0
    epoch: int = 0
    batch: int = -1

    def begin(self, epoch: int, *, first: int = 0) -> None:
        """Comes before a batch of an epoch, with which this worker begins in it."""
        self.epoch, self.first, self.batch = epoch, first, first - 1

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
        """True if the batch is the epoch's last one."""
        return self.batch + 1 == self.steps


class RankWeight:
    """This rank's part of all rows of the step that has begun, as the plan says.

    Args:
        first: Epoch and step with which this process begins.

    Attributes:
        plan: The steps of an epoch.
        rank: This rank.
        first: Epoch and step with which this process begins.
        epoch: The epoch that has begun; `StepCounter` sets it.
        step: The step of it; when an epoch begins, the first one that is taken here.
        in_step: Whether a step, or a run of steps, is under way.
        pause: The steps of the epoch after which somebody wants to look at the model: there a run of steps ends.
        cell: The part, shape (1,), where a kernel reads it; written when a step begins.

    >>> share = RankWeight(EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2), 1)
    >>> share.step = 1
    >>> share(), share.is_idle, share.since(0)
    (0.0, True, 0.3333333333333333)
    """

    def __init__(self, plan: EpochPlan, rank: int, first: tuple[int, int] = (0, 0)) -> None:
        self.plan = plan
        self.rank = rank
        self.first = first
        self.epoch = self.step = self.pause = self._next = 0
        self.in_step = False
        self.cell = np.zeros(1)

    def begin(self, step: int) -> None:
        """Notes that a step of the epoch begins."""
        self.step, self.in_step = step, True
        self.cell[0] = self()

    def begin_run(self, step: int) -> None:
        """Notes that several steps are taken by one call from here on, each of which `begin_next` is told of."""
        self._next = step

    def begin_next(self) -> None:
        """Notes that the next step of a run begins, in which this rank may have another part."""
        self.begin(self._next)
        self._next += 1

    def __call__(self) -> float:
        """Returns the part, from zero to one."""
        return self.plan.share_at(self.rank, self._number)

    @property
    def _number(self) -> int:
        return self.plan.number(self.epoch, self.step)

    @property
    def is_idle(self) -> bool:
        """True if this rank brings no row to the step."""
        return self.plan.rows_at(self.rank, self._number) == 0

    def since(self, first: int) -> float:
        """Returns the part of all rows of the epoch's steps from ``first`` up to the present one, with that."""
        return self.plan.share_between(self.rank, self.plan.number(self.epoch, first), self._number + 1)


class StepCounter(keras.callbacks.Callback):
    """Tells a share which step begins, and keeps its number for messages; the first callback of all."""

    def __init__(self, weight: RankWeight) -> None:
        super().__init__()
        self._weight = weight

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        first_epoch, first_step = self._weight.first
        self._weight.epoch, self._weight.step = epoch, first_step if epoch == first_epoch else 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._weight.begin(batch)
        begin_step(self._weight.plan.number(self._weight.epoch, batch) + 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # It may be the last of a run.
        self._weight.step, self._weight.in_step = batch, False


class StepTimes(keras.callbacks.Callback):
    """Tells when a rank's steps began, and what their seconds went into, for the trace of a fit; the last callback.

    Of an epoch these are the first and the last thousand steps, and of the fit no more than its part of `MOST_STEPS`.

    Args:
        reporter: Told at the first epoch's begin and at each epoch's end.
        world_size: Ranks of the fit.
        feed: Where the rows come from; it is told of steps before.
        exchange: Counts what goes to other ranks, or to servers.
        position: Knows the batch, where an epoch may begin in its middle.
    """

    def __init__(
        self,
        reporter: StepReporter,
        rank: int,
        world_size: int,
        feed: BatchFeed,
        exchange: ExchangeCounts,
        position: TrainingPosition | None = None,
    ) -> None:
        super().__init__()
        self._reporter = reporter
        self._rank = rank
        self._feed = feed
        self._exchange = exchange
        self._position = position
        self._left = MOST_STEPS // world_size
        self._has_begun = False
        # One for all that is told: times would jump with a clock that is set.
        self._clock_s = time.time() - time.monotonic()

    def around(self, callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """Returns callbacks, each with one behind it that notes when it has ended an epoch, and at last this one."""
        noted = [part for callback in callbacks for part in (callback, _EpochEnds(type(callback).__name__))]
        return [_EpochEnds(None), *noted, self]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._has_begun:
            self._has_begun = True
            PROCESS.end("preparing")
            self._send(None, PROCESS.ended, [], PROCESS.of_task)
        self._first: list[tuple[float, ...]] = []
        self._last: deque[tuple[float, ...]] = deque(maxlen=STEPS_AT_ENDS)
        self._count, self._validations = 0, list[tuple[str, float, float]]()
        self._began = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = (time.monotonic(), self._exchange.waited_s, self._feed.waited_s)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        began, waited_s, fed_s = self._before
        number = (batch if self._position is None else self._position.batch) + 1
        now = time.monotonic()
        step = (number, began, now, self._exchange.waited_s - waited_s, self._feed.waited_s - fed_s)
        (self._first if len(self._first) < STEPS_AT_ENDS else self._last).append(step)
        self._count += 1

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._test_began = time.monotonic()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._validations.append(("validation", self._test_began, time.monotonic()))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        steps = [*self._first, *self._last][: self._left]
        self._left -= len(steps)
        about = [["steps", self._count], ["steps left out", self._count - len(steps)]]
        whole = (f"epoch {epoch + 1}", self._began, time.monotonic(), *about)
        ends = [phase for phase in PROCESS.ended if phase[2] - phase[1] > _SHORT_S]
        self._send(epoch, [whole, *ends, *self._validations], steps)

    def _send(
        self,
        epoch: int | None,
        phases: Sequence[Sequence[Any]],
        steps: Sequence[Sequence[float]],
        task_phases: Sequence[Sequence[Any]] = (),
    ) -> None:
        self._reporter.send(
            RankTrace(
                rank=self._rank,
                epoch=epoch,
                phases=[list(phase) for phase in phases],
                task_phases=[list(phase) for phase in task_phases],
                clock_s=self._clock_s,
                sent=time.monotonic(),
                arrays=(np.array(steps, np.float64).reshape(-1, 5),),
            )
        )


class _EpochEnds(keras.callbacks.Callback):
    """Notes that the callback before it has ended an epoch; without a name, that the last step has."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._name is None:
            PROCESS.begin()
        else:
            PROCESS.end(self._name)
