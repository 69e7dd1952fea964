"""Who brings which rows to which step: arithmetic that every rank does alike, without a message.

Once the ranks have told each other how many rows they hold, each can compute for
every step how many rows every rank brings. All ranks take the same number of
steps; every row is used exactly once per epoch; a rank that has run out joins
the remaining steps with weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ORDER, _SPLIT, _STATE = 1, 2, 3


@dataclass(frozen=True)
class EpochPlan:
    """The steps of one epoch.

    Args:
        training_rows: Rows that each rank trains on, by rank.
        validation_rows: Rows that each rank validates on, by rank.
        batch_size: Rows per rank and step.

    Example:
        >>> plan = EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2)
        >>> plan.steps
        3
        >>> [plan.rows_at(0, step) for step in range(3)], [plan.rows_at(1, step) for step in range(3)]
        ([2, 2, 1], [2, 0, 0])
        >>> plan.share_at(0, 2)
        1.0
    """

    training_rows: tuple[int, ...]
    validation_rows: tuple[int, ...]
    batch_size: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.training_rows)

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return max(self.own_steps(rank) for rank in range(self.world_size))

    def own_steps(self, rank: int) -> int:
        """Steps to which the rank brings rows; they are the first ones of the epoch."""
        return -(-self.training_rows[rank] // self.batch_size)

    def validation_steps(self, rank: int) -> int:
        """Batches that the rank validates on."""
        return -(-self.validation_rows[rank] // self.batch_size)

    def rows_at(self, rank: int, step: int) -> int:
        """Rows that the rank brings to the step: zero once it has run out."""
        return min(max(self.training_rows[rank] - step * self.batch_size, 0), self.batch_size)

    def share_at(self, rank: int, step: int) -> float:
        """The rank's part of all rows of the step: the weight of its gradient in the average."""
        return self.rows_at(rank, step) / sum(self.rows_at(peer, step) for peer in range(self.world_size))


@dataclass(frozen=True)
class Run:
    """Batches of one length that follow one another in an epoch.

    Args:
        start: Place of their first row in the epoch's order.
        batches: How many there are.
        rows: Rows of each; zero in steps to which the rank brings none.
    """

    start: int
    batches: int
    rows: int


def runs_of_epoch(num_rows: int, batch_size: int, steps: int, longest: int) -> list[Run]:
    """Divides the steps of a rank's epoch into runs that are read at once.

    Args:
        num_rows: Rows of the rank.
        batch_size: Rows of a step, as long as there are enough.
        steps: Steps of the epoch, those without rows included.
        longest: Batches of a run at most.

    >>> [(run.start, run.batches, run.rows) for run in runs_of_epoch(7, batch_size=2, steps=6, longest=2)]
    [(0, 2, 2), (4, 1, 2), (6, 1, 1), (7, 2, 0)]
    """
    full, rest = divmod(num_rows, batch_size)
    runs = [Run(first * batch_size, min(longest, full - first), batch_size) for first in range(0, full, longest)]
    if rest:
        runs.append(Run(full * batch_size, 1, rest))
    idle = steps - full - (rest > 0)
    return runs + [Run(num_rows, min(longest, idle - first), 0) for first in range(0, idle, longest)]


def split_validation(rows: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Returns how many of its rows each rank keeps for validation.

    The total is ``round(fraction * sum(rows))``, at least one row where the fraction
    is not zero, and never all rows. It is divided over the ranks in proportion to
    their rows, largest remainders first.

    >>> split_validation([10, 30], 0.1)
    (1, 3)
    >>> split_validation([3, 0, 4], 0.1)
    (0, 0, 1)
    """
    total = sum(rows)
    if fraction <= 0 or total < 2:
        return (0,) * len(rows)
    wanted = min(max(round(fraction * total), 1), total - 1)
    exact = [wanted * count / total for count in rows]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(rows)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: wanted - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def random_rows(seed: int, rank: int, num_rows: int, count: int) -> np.ndarray:
    """Returns ``count`` of a rank's row positions, drawn without replacement and sorted: its validation rows."""
    return np.sort(_generator(_SPLIT, seed, rank).permutation(num_rows)[:count])


def row_order(seed: int, epoch: int, rank: int, num_rows: int, *, shuffle: bool) -> np.ndarray:
    """Returns the positions of a rank's training rows in the order in which an epoch uses them.

    Args:
        seed: The fit's seed.
        epoch: From zero.
        rank: The rank that holds the rows.
        num_rows: How many it holds.
        shuffle: False keeps the order of the partition.
    """
    if not shuffle:
        return np.arange(num_rows)
    return _generator(_ORDER, seed, epoch, rank).permutation(num_rows)


def random_state(seed: int, rank: int, index: int) -> np.ndarray:
    """Returns two uint32 numbers for the ``index``-th random generator of a rank's model."""
    return _generator(_STATE, seed, rank, index).integers(0, 2**32, size=2, dtype=np.uint32)


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
