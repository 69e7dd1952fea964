"""How much a rank counts in an average over the ranks: its part of the rows."""

from __future__ import annotations

from elephant.data.epoch_plan import EpochPlan


class StepShare:
    """This rank's part of all rows of a step, as the plan says.

    Args:
        plan: The steps of an epoch.
        rank: Whose part it is.

    Attributes:
        step: The step of the epoch that has begun; callers set it.
    """

    def __init__(self, plan: EpochPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self.step = 0

    def __call__(self) -> float:
        """Returns the part, from zero to one."""
        return self._plan.share_at(self._rank, self.step)


def share_between(plan: EpochPlan, rank: int, first: int, last: int) -> float:
    """Returns a rank's part of all rows of the steps from ``first`` up to, but without, ``last``.

    >>> plan = EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2)
    >>> share_between(plan, 0, 0, 2), share_between(plan, 1, 2, 3)
    (0.6666666666666666, 0.0)
    """
    rows = [min(last * plan.batch_size, count) - min(first * plan.batch_size, count) for count in plan.training_rows]
    return rows[rank] / sum(rows) if sum(rows) else 0.0
