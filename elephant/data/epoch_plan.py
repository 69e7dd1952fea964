"""Rows of each step by rank: arithmetic that every rank does alike, without a message.

Once the ranks have told each other how many rows they hold, each can compute for
every step how many rows every rank brings. All ranks take the same number of
steps; every row is used exactly once per pass; a rank that has run out joins
the remaining steps with weight zero.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ORDER, _SPLIT, _STATE = 1, 2, 3


@dataclass(frozen=True)
class EpochPlan:
    """The steps of an epoch, and of a pass over the rows.

    A pass uses every row once. An epoch is a pass, unless it was given another number of steps: then it goes on in
    the pass where the last epoch ended. Steps are numbered from zero over the whole fit.

    Args:
        training_rows: Rows that each rank trains on, by rank.
        validation_rows: Rows that each rank validates on, by rank.
        batch_size: Rows per rank and step.
        steps_per_epoch: Steps of an epoch; None means those of a pass.
        most_steps: Steps of an epoch, and of a validation, at most; None does not limit them.

    Example:
        >>> plan = EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2)
        >>> plan.steps
        3
        >>> [plan.rows_at(0, step) for step in range(3)], [plan.rows_at(1, step) for step in range(3)]
        ([2, 2, 1], [2, 0, 0])
        >>> plan.share_at(0, 2)
        1.0
        >>> longer = EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2, steps_per_epoch=4)
        >>> longer.steps, [longer.rows_at(1, longer.number(0, step)) for step in range(4)]
        (4, [2, 0, 0, 2])
    """

    training_rows: tuple[int, ...]
    validation_rows: tuple[int, ...]
    batch_size: int
    steps_per_epoch: int | None = None
    most_steps: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.training_rows)

    @property
    def varies(self) -> bool:
        """True if a rank may bring another number of rows to each step; otherwise all its batches but one are alike."""
        return False

    @functools.cached_property
    def pass_steps(self) -> int:
        """Steps in which every row is used once, the same on every rank."""
        return max(self.own_steps(rank) for rank in range(self.world_size))

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self._limited(self.pass_steps if self.steps_per_epoch is None else self.steps_per_epoch)

    def _limited(self, steps: int) -> int:
        return steps if self.most_steps is None else min(steps, self.most_steps)

    def number(self, epoch: int, step: int) -> int:
        """The number over the whole fit of an epoch's step."""
        return epoch * self.steps + step

    def next_change(self, number: int) -> int:
        """The first step after this one in which a rank may bring another number of rows than in this one.

        Steps up to there are taken as one.

        >>> plan = EpochPlan(training_rows=(9, 5), validation_rows=(0, 0), batch_size=2)
        >>> [plan.next_change(number) for number in (0, 1, 2, 3, 4, 5)]
        [2, 2, 3, 4, 5, 7]
        """
        passes, step = divmod(number, max(self.pass_steps, 1))
        return passes * self.pass_steps + self._changes[bisect.bisect(self._changes, step)]

    @functools.cached_property
    def _changes(self) -> list[int]:
        """Steps of a pass with which a rank's whole batches, or all its batches, have ended."""
        whole = {rows // self.batch_size for rows in self.training_rows}
        return sorted(whole | {self.own_steps(rank) for rank in range(self.world_size)})

    def own_steps(self, rank: int) -> int:
        """Steps of a pass to which the rank brings rows; they are the first ones."""
        return -(-self.training_rows[rank] // self.batch_size)

    def validation_steps(self, rank: int) -> int:
        """Batches that the rank validates on."""
        return self._limited(-(-self.validation_rows[rank] // self.batch_size))

    def rows_at(self, rank: int, number: int) -> int:
        """Rows that the rank brings to the step: zero once it has run out, until the next pass."""
        return self.rows_between(rank, number, number + 1)

    def rows_between(self, rank: int, first: int, last: int) -> int:
        """Rows that the rank brings to the steps from ``first`` up to, but without, ``last``."""
        return self._rows_before(rank, last) - self._rows_before(rank, first)

    def _rows_before(self, rank: int, number: int) -> int:
        passes, step = divmod(number, max(self.pass_steps, 1))
        rows = self.training_rows[rank]
        return passes * rows + min(step * self.batch_size, rows)

    def _rows_of_all(self, number: int) -> int:
        """Returns the rows of all ranks before a step, in the time of a search: each step asks for them."""
        passes, step = divmod(number, max(self.pass_steps, 1))
        used_up, rows = step * self.batch_size, self._sorted_rows
        done = bisect.bisect_right(rows, used_up)
        return passes * self._sums[-1] + self._sums[done] + (len(rows) - done) * used_up

    @functools.cached_property
    def _sorted_rows(self) -> list[int]:
        return sorted(self.training_rows)

    @functools.cached_property
    def _sums(self) -> list[int]:
        """Rows of the ranks with the fewest, by how many ranks."""
        return list(itertools.accumulate(self._sorted_rows, initial=0))

    def share_at(self, rank: int, number: int) -> float:
        """The rank's part of all rows of the step: the weight of its gradient in the average."""
        return self.share_between(rank, number, number + 1)

    def share_between(self, rank: int, first: int, last: int) -> float:
        """The rank's part of all rows of the steps from ``first`` up to, but without, ``last``.

        >>> plan = EpochPlan(training_rows=(5, 2), validation_rows=(0, 0), batch_size=2)
        >>> plan.share_between(0, 0, 2), plan.share_between(1, 2, 3)
        (0.6666666666666666, 0.0)
        """
        total = self._rows_of_all(last) - self._rows_of_all(first)
        return self.rows_between(rank, first, last) / total if total else 0.0


@dataclass(frozen=True)
class BatchRun:
    """Batches of one length that follow one another in a pass.

    Args:
        start: Place of their first row in the pass' order.
        batches: How many there are.
        rows: Rows of each; zero in steps to which the rank brings none.
    """

    start: int
    batches: int
    rows: int


def runs_of_pass(num_rows: int, batch_size: int, steps: int, longest: int) -> list[BatchRun]:
    """Divides the steps of a rank's pass into runs that are read at once.

    Args:
        steps: Steps of the pass, those without rows included.
        longest: Batches of a run at most.

    >>> [(run.start, run.batches, run.rows) for run in runs_of_pass(7, batch_size=2, steps=6, longest=2)]
    [(0, 2, 2), (4, 1, 2), (6, 1, 1), (7, 2, 0)]
    """
    full, rest = divmod(num_rows, batch_size)
    runs = [BatchRun(first * batch_size, min(longest, full - first), batch_size) for first in range(0, full, longest)]
    if rest:
        runs.append(BatchRun(full * batch_size, 1, rest))
    idle = steps - full - (rest > 0)
    return runs + [BatchRun(num_rows, min(longest, idle - first), 0) for first in range(0, idle, longest)]


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
    if not count:
        return np.empty(0, np.int64)
    return np.sort(generator(_SPLIT, seed, rank).choice(num_rows, count, replace=False, shuffle=False))


def row_order(seed: int, epoch: int, rank: int, num_rows: int, *, shuffle: bool) -> np.ndarray:
    """Returns the positions of a rank's training rows in the order in which a pass uses them: a permutation of all.

    Args:
        epoch: The pass, from zero.
    """
    if not shuffle:
        return np.arange(num_rows)
    return generator(_ORDER, seed, epoch, rank).permutation(num_rows)


def random_state(seed: int, rank: int, index: int) -> np.ndarray:
    """Returns two uint32 numbers for the ``index``-th random generator of a rank's model."""
    return generator(_STATE, seed, rank, index).integers(0, 2**32, size=2, dtype=np.uint32)


def generator(*key: int) -> np.random.Generator:
    """Returns a random generator that numbers alone decide; the first says what is drawn with it."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
