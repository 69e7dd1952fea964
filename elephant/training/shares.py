"""How much a rank counts in an average over the ranks: its part of the rows."""

from __future__ import annotations

from typing import Any

import keras

from elephant.data.epoch_plan import EpochPlan
from elephant.training.steps import begin_step


class StepShare:
    """This rank's part of all rows of the step that has begun, as the plan says.

    Args:
        plan: The steps of an epoch.
        rank: Whose part it is.

    Attributes:
        plan: The steps of an epoch.
        epoch: The epoch that has begun; `ShareSteps` sets it.
        step: The step of it.

    >>> share = StepShare(EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2), 1)
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


class ShareSteps(keras.callbacks.Callback):
    """Tells a share which step begins, and keeps its number for messages; the first callback of all.

    Args:
        share: To be kept up to date.
    """

    def __init__(self, share: StepShare) -> None:
        super().__init__()
        self._share = share

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._share.epoch, self._share.step = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._share.step = batch
        begin_step(self._share.plan.number(self._share.epoch, batch) + 1)
