"""Position of a worker in its epochs, and weight of a rank in an average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from elephant.data.epoch_plan import EpochPlan
from elephant.training.process_pipe import begin_step


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


class RankWeight:
    """This rank's part of all rows of the step that has begun, as the plan says.

    Attributes:
        plan: The steps of an epoch.
        epoch: The epoch that has begun; `StepCounter` sets it.
        step: The step of it.

    >>> share = RankWeight(EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2), 1)
    >>> share.step = 1
    >>> share(), share.is_idle, share.since(0)
    (0.0, True, 0.3333333333333333)
    """

    def __init__(self, plan: EpochPlan, rank: int) -> None:
        self.plan = plan
        self._rank = rank
        self.epoch = self.step = 0

    def __call__(self) -> float:
        """Returns the part, from zero to one."""
        return self.plan.share_at(self._rank, self._number)

    @property
    def _number(self) -> int:
        return self.plan.number(self.epoch, self.step)

    @property
    def is_idle(self) -> bool:
        """Whether this rank brings no row to the step."""
        return self.plan.rows_at(self._rank, self._number) == 0

    def since(self, first: int) -> float:
        """Returns the part of all rows of the epoch's steps from ``first`` up to the present one, with that."""
        return self.plan.share_between(self._rank, self.plan.number(self.epoch, first), self._number + 1)


class StepCounter(keras.callbacks.Callback):
    """Tells a share which step begins, and keeps its number for messages; the first callback of all."""

    def __init__(self, share: RankWeight) -> None:
        super().__init__()
        self._share = share

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._share.epoch, self._share.step = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._share.step = batch
        begin_step(self._share.plan.number(self._share.epoch, batch) + 1)
