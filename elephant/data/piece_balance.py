"""Balance of virtual shards: who is to have which, by the seconds that ranks have needed for theirs.

Ranks that take every step together are as fast as the slowest one. Where one needs longer for as many rows, because its
host has less to give, some of its virtual shards are better off elsewhere; a global step has the same rows wherever
they are. Which ones go is decided from sums over epochs, and only where the difference is no noise, holds on, and is
worth more in the epochs that are left than the moving costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elephant.data.virtual_shards import ElasticPlan

# Part of an epoch's steps that a move has to save. Equal ranks whose times differ by 15 % in either direction, the
# limit that `elephant.monitor.stragglers` has for noise, seem to save that much at most.
_LEAST_GAIN = 0.15
# Epochs are looked at together up to so long a time, as shorter ones differ by chance.
_SHORTEST_S = 5.0
# Of the first epoch of ranks, or of rows that have moved, which traces the model, or compiles it for other sizes.
_SHORTEST_FIRST_S = 60.0
# Windows in a row that a move needs, each of which asks for it.
_LEAST_WINDOWS = 2
# A move that brings less than this part of what was expected has the next one need twice as many.
_LEAST_SAVED = 0.5
# Until the first move has told it: bytes that a rank rewrites in a second, and what a move takes at least.
_BYTES_PER_S = 50e6
_LEAST_MOVE_S = 1.0
# A virtual shard that saves less than this part of the slowest rank's time stays where it is.
_LEAST_PIECE = 0.01


@dataclass(frozen=True, eq=False)
class RankSpeeds:
    """Seconds of ranks in an epoch, and how they change with rows.

    Args:
        seconds: Of each rank in its steps, without waiting for others; float64 of shape (ranks,).
        less_s: Seconds that each rank saves with a row less.
        more_s: Seconds that each rank needs for a row more; infinite where nothing is known of it.
        most_rows: Rows of training and of validation that each rank has room for.
    """

    seconds: np.ndarray
    less_s: np.ndarray
    more_s: np.ndarray
    most_rows: np.ndarray


def balanced_owners(plan: ElasticPlan, speeds: RankSpeeds) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns who is to have each virtual shard, and the seconds that each rank would need then.

    One virtual shard after the other leaves the rank that is the slowest: the one that brings most, for where it takes
    least. Every rank keeps one.

    >>> pieces = {"piece_rows": (10, 10, 10, 10, 10, 10), "piece_validation": (0,) * 6, "owners": (0, 1, 0, 1, 0, 1)}
    >>> plan = ElasticPlan((30, 30), (0, 0), 10, **pieces)
    >>> row_s, room = np.array([0.1, 0.2]), np.array([100, 100])
    >>> owners, seconds = balanced_owners(plan, RankSpeeds(30 * row_s, row_s, row_s, room))
    >>> owners, seconds.round(1).tolist()
    ((0, 0, 0, 1, 0, 1), [4.0, 4.0])
    """
    owners, seconds = np.array(plan.owners), speeds.seconds.astype(np.float64)
    rows, sizes = np.array(plan.piece_rows), np.array(plan.piece_rows) + np.array(plan.piece_validation)
    held = np.bincount(owners, weights=sizes, minlength=plan.world_size)
    least = _LEAST_PIECE * seconds.max(initial=0.0)
    stays = rows > 0
    while True:
        slowest = int(seconds.argmax())
        movable = np.flatnonzero(stays & (owners == slowest))
        if np.count_nonzero(rows[owners == slowest]) < 2 or not len(movable):
            break
        # Of shape (pieces, ranks).
        taken_s = seconds + np.where(np.isfinite(speeds.more_s), speeds.more_s, 0.0) * rows[movable, np.newaxis]
        has_room = held + sizes[movable, np.newaxis] <= speeds.most_rows
        others = (np.arange(len(seconds)) != slowest) & np.isfinite(speeds.more_s)
        taken_s = np.where(has_room & others, taken_s, np.inf)
        after = np.maximum(taken_s.min(axis=1), seconds[slowest] - speeds.less_s[slowest] * rows[movable])
        place = int(after.argmin())
        if not after[place] < seconds[slowest] - least:
            break
        piece, taker = int(movable[place]), int(taken_s[place].argmin())
        seconds[slowest] -= speeds.less_s[slowest] * rows[piece]
        seconds[taker] = taken_s[place, taker]
        held[slowest] -= sizes[piece]
        held[taker] += sizes[piece]
        owners[piece], stays[piece] = taker, False
    return tuple(owners.tolist()), seconds


@dataclass
class _Window:
    """Epochs that are looked at together: sums of their seconds."""

    busy_s: np.ndarray
    steps_s: float = 0.0
    epochs: int = 0

    def add(self, busy_s: np.ndarray, steps_s: float, epochs: int = 1) -> None:
        self.busy_s = self.busy_s + busy_s
        self.steps_s += steps_s
        self.epochs += epochs


class PieceBalance:
    """Decides at the ends of epochs whether virtual shards move, and which.

    Args:
        plan: Who has which.
        row_bytes: Bytes of a row.
    """

    def __init__(self, plan: ElasticPlan, row_bytes: float) -> None:
        self._plan = plan
        self._move_s = row_bytes / _BYTES_PER_S
        # Part of each rank's time that goes with its rows; only what rows that left have told is less than the total.
        self._varying = np.ones(plan.world_size)
        self._needed = _LEAST_WINDOWS
        # Before the last move: seconds of an epoch by rank, its rows, and the seconds that were to be saved.
        self._before: tuple[np.ndarray, np.ndarray, float] | None = None
        self._begin()

    def _begin(self) -> None:
        self._is_first = True
        self._window = _Window(np.zeros(self._plan.world_size))
        self._windows: list[_Window] = []

    @property
    def _rows(self) -> np.ndarray:
        return np.array(self._plan.training_rows, np.float64)

    def epoch_ended(
        self, busy_s: Sequence[float], steps_s: float, most_rows: Sequence[float], epochs_left: int
    ) -> tuple[int, ...] | None:
        """Returns the new owner of each virtual shard; None where none moves.

        Args:
            busy_s: Seconds of each rank in its steps, without waiting for others.
            steps_s: Seconds from the first step's begin to the last one's end.
            most_rows: Rows that each rank has room for.
            epochs_left: Epochs that are still to come.
        """
        is_first, self._is_first = self._is_first, False
        if is_first and steps_s < _SHORTEST_FIRST_S:
            return None
        self._window.add(np.array(busy_s, np.float64), steps_s)
        if self._window.steps_s < _SHORTEST_S:
            return None
        window, self._window = self._window, _Window(np.zeros(self._plan.world_size))
        self._look_back(window)
        room = np.array(most_rows, np.float64)
        if self._gain(window, room)[1] < _LEAST_GAIN * window.steps_s / window.epochs:
            self._windows = []
            return None
        self._windows = [*self._windows, window][-self._needed :]
        if len(self._windows) < self._needed:
            return None
        total = _Window(np.zeros(self._plan.world_size))
        for one in self._windows:
            total.add(one.busy_s, one.steps_s, one.epochs)
        owners, gain_s = self._gain(total, room)
        is_worth_it = gain_s * epochs_left > self._cost_s(owners)
        if gain_s < _LEAST_GAIN * total.steps_s / total.epochs or not is_worth_it or not self._fits(owners, room):
            return None
        self._before = (total.busy_s / total.epochs, self._rows, gain_s)
        return owners

    def moved(self, plan: ElasticPlan, took_s: float) -> None:
        """Notes that virtual shards have moved.

        Args:
            took_s: Seconds in which training stood still for it.
        """
        rewritten = _most_rewritten(self._plan, plan.owners)
        self._move_s = max(took_s - _LEAST_MOVE_S, 0.0) / max(rewritten, 1)
        self._plan = plan
        self._begin()

    def _gain(self, window: _Window, most_rows: np.ndarray) -> tuple[tuple[int, ...], float]:
        """Returns the best owners, and the seconds that they save of an epoch."""
        seconds, rows = window.busy_s / window.epochs, self._rows
        row_s = np.divide(seconds, rows, out=np.full(len(rows), np.inf), where=rows > 0)
        less_s = np.where(np.isfinite(row_s), row_s, 0.0) * self._varying
        owners, after = balanced_owners(self._plan, RankSpeeds(seconds, less_s, row_s, most_rows))
        return owners, float(seconds.max() - after.max())

    def _look_back(self, window: _Window) -> None:
        """Learns from the last move which part of the ranks' time goes with their rows, and whether it has helped."""
        if self._before is None:
            return
        (before_s, before_rows, expected_s), self._before = self._before, None
        after_s, rows = window.busy_s / window.epochs, self._rows
        for rank in np.flatnonzero((rows < before_rows) & (before_s > 0)).tolist():
            saved, gone = 1 - after_s[rank] / before_s[rank], 1 - rows[rank] / before_rows[rank]
            self._varying[rank] = np.clip(saved / gone, 0.0, 1.0)
        has_helped = before_s.max() - after_s.max() >= _LEAST_SAVED * expected_s
        self._needed = _LEAST_WINDOWS if has_helped else 2 * self._needed

    def _cost_s(self, owners: Sequence[int]) -> float:
        return _LEAST_MOVE_S + self._move_s * _most_rewritten(self._plan, owners)

    def _fits(self, owners: Sequence[int], most_rows: np.ndarray) -> bool:
        """Returns whether each rank whose rows change has room for the new ones beside those that it has."""
        return bool(np.all(_rewritten(self._plan, owners) <= most_rows))


def _rewritten(plan: ElasticPlan, owners: Sequence[int]) -> np.ndarray:
    """Returns the rows that each rank writes for a move: all that it has then, or none where nothing changes for it."""
    before, after = np.array(plan.owners), np.array(owners)
    sizes = np.array(plan.piece_rows) + np.array(plan.piece_validation)
    moved = before != after
    changed = np.isin(np.arange(plan.world_size), np.concatenate([before[moved], after[moved]]))
    return np.bincount(after, weights=sizes, minlength=plan.world_size) * changed


def _most_rewritten(plan: ElasticPlan, owners: Sequence[int]) -> float:
    return float(_rewritten(plan, owners).max())
