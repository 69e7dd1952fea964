"""Virtual shards: pieces of the rows by content, many more than workers, so that a step always has the same rows.

A row's piece follows from what it holds. Each piece is spread evenly over the steps of a pass, by arithmetic on the
pieces' sizes alone, and has an order of its own, by the seed, the pass and the piece. So a global step takes the same
rows whatever the number of ranks, and wherever a piece is: a rank brings the rows of its pieces. The state of the data
is one number, that of the step. (The idea is that of elastic determinism in MosaicML's streaming, with pieces that are
not of one size: the ranks' parts of a step differ by some rows, which the weights of their gradients make up for.)
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elephant.data.epoch_plan import BatchRun, EpochPlan, random_rows, row_order, split_validation
from elephant.errors import TrainingError

# Ranks' parts of a step differ the less, the more pieces each has; their sizes are told by all ranks to all.
PIECES_PER_WORKER = 16
# Steps whose rows are counted at once: a few megabytes.
_BLOCK_STEPS = 2048
# Halvings after which two neighbors among floating-point numbers are left of any interval below one.
_HALVINGS = 60


def number_of_pieces(most_workers: int) -> int:
    """Returns how many virtual shards the rows of a fit have, by its largest number of workers.

    >>> number_of_pieces(8)
    128
    """
    return PIECES_PER_WORKER * most_workers


def owner_of(piece: int, num_workers: int) -> int:
    """Returns the worker that has a virtual shard, of so many.

    >>> [owner_of(piece, 3) for piece in range(5)]
    [0, 1, 2, 0, 1]
    """
    return piece % num_workers


def rows_before(sizes: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Returns how many rows of each piece a pass has used after so many rows of all, int64 of shape (cuts, pieces).

    The j-th row of a piece of n stands at (j + 1/2) / n of the way through the pass, and of those that stand at the
    same place, that of the first piece comes first. The place of each cut is found by bisection, so that no row needs a
    place of its own. That is the same on all hosts, and grows with the cut, piece by piece.

    Args:
        sizes: Rows of each piece.
        cuts: Rows of all pieces, from none to all.

    >>> rows_before(np.array([4, 2]), np.array([0, 2, 3, 6])).tolist()
    [[0, 0], [1, 1], [2, 1], [4, 2]]
    """
    rows, total, spread = sizes.astype(np.float64), int(sizes.sum()), len(sizes) + 1

    def counted(places: np.ndarray) -> np.ndarray:
        return np.floor(places[:, np.newaxis] * rows + 0.5)

    low = np.clip((cuts - spread) / max(total, 1), 0.0, 1.0)
    high = np.clip((cuts + spread) / max(total, 1), 0.0, 1.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_over = counted(middle).sum(axis=1) > cuts
        high, low = np.where(is_over, middle, high), np.where(is_over, low, middle)
    below = np.minimum(counted(low), rows).astype(np.int64)
    ties = np.minimum(counted(high), rows).astype(np.int64) - below
    missing = cuts - below.sum(axis=1)
    given = np.clip(missing[:, np.newaxis] - (ties.cumsum(axis=1) - ties), 0, ties)
    return np.asarray(below + given)


@dataclass(frozen=True, eq=False)
class ElasticPlan(EpochPlan):
    """The steps of an epoch whose rows are in virtual shards: the same rows in each, whatever the number of ranks.

    Args:
        piece_rows: Rows to train on of each virtual shard.
        piece_validation: Rows for validation of each.
        owners: Rank that has each of them.
        global_rows: Rows of all ranks in a step.

    Example:
        >>> pieces = {"piece_rows": (4, 2, 3), "piece_validation": (0, 0, 0), "owners": (0, 1, 0), "global_rows": 4}
        >>> plan = ElasticPlan((7, 2), (0, 0), 4, **pieces)
        >>> plan.steps, [plan.rows_at(0, step) for step in range(3)], [plan.rows_at(1, step) for step in range(3)]
        (3, [3, 3, 1], [1, 1, 0])
        >>> plan.share_at(0, 0), plan.own_steps(1)
        (0.75, 2)
    """

    piece_rows: tuple[int, ...] = ()
    piece_validation: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    global_rows: int = 1

    @property
    def varies(self) -> bool:
        """True: a rank brings another number of rows to each step."""
        return True

    @functools.cached_property
    def pass_steps(self) -> int:
        """Steps in which every row is used once."""
        return -(-self._total // self.global_rows)

    @functools.cached_property
    def _total(self) -> int:
        return sum(self.piece_rows)

    def with_owners(self, owners: Sequence[int]) -> ElasticPlan:
        """Returns the plan of the same steps, with virtual shards on other ranks.

        >>> pieces = {"piece_rows": (4, 2, 3), "piece_validation": (1, 0, 1), "owners": (0, 1, 0)}
        >>> moved = ElasticPlan((7, 2), (2, 0), 4, **pieces).with_owners((0, 1, 1))
        >>> moved.training_rows, moved.validation_rows
        ((4, 5), (1, 1))
        """
        ranks = range(self.world_size)
        training, validation = (
            tuple(sum(part[piece] for piece, owner in enumerate(owners) if owner == rank) for rank in ranks)
            for part in (self.piece_rows, self.piece_validation)
        )
        return replace(self, training_rows=training, validation_rows=validation, owners=tuple(owners))

    def pieces_of(self, rank: int) -> list[int]:
        """Virtual shards that a rank has, in their order."""
        return [piece for piece, owner in enumerate(self.owners) if owner == rank]

    def piece_ends(self, pieces: Sequence[int]) -> np.ndarray:
        """Rows of some virtual shards that a pass has used before each of its steps, and in the end.

        Returns:
            int64 of shape (steps + 1, pieces).
        """
        chosen = list(pieces)
        return np.concatenate([block[:, chosen] for block in self._blocks()])

    def _blocks(self) -> list[np.ndarray] | map[np.ndarray]:
        sizes = np.array(self.piece_rows, np.int64)
        cuts = np.minimum(np.arange(self.pass_steps + 1) * self.global_rows, self._total)
        return map(functools.partial(rows_before, sizes), np.split(cuts, range(_BLOCK_STEPS, len(cuts), _BLOCK_STEPS)))

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """Rows that each rank has brought before each step of a pass, and in the end: shape (steps + 1, ranks)."""
        membership = np.zeros((len(self.owners), self.world_size), np.int64)
        membership[np.arange(len(self.owners)), list(self.owners)] = 1
        return np.concatenate([block @ membership for block in self._blocks()])

    @functools.cached_property
    def _at(self) -> np.ndarray:
        """Rows that each rank brings to each step of a pass: shape (steps, ranks)."""
        return np.diff(self._before, axis=0)

    @functools.cached_property
    def _piece_changes(self) -> list[int]:
        differs = np.any(np.diff(self._at > 0, axis=0), axis=1)
        return [*(np.flatnonzero(differs) + 1).tolist(), self.pass_steps]

    def next_change(self, number: int) -> int:
        """The first step after this one in which a rank begins or ends to bring any rows, or a pass begins."""
        passes, step = divmod(number, max(self.pass_steps, 1))
        return passes * self.pass_steps + self._piece_changes[bisect.bisect(self._piece_changes, step)]

    def own_steps(self, rank: int) -> int:
        """Steps of a pass to which the rank brings rows; they may be any."""
        return int(np.count_nonzero(self._at[:, rank]))

    def rows_between(self, rank: int, first: int, last: int) -> int:
        """Rows that the rank brings to the steps from ``first`` up to, but without, ``last``."""
        return self._brought(rank, last) - self._brought(rank, first)

    def _brought(self, rank: int, number: int) -> int:
        passes, step = divmod(number, max(self.pass_steps, 1))
        return passes * self.training_rows[rank] + int(self._before[step, rank])

    def share_between(self, rank: int, first: int, last: int) -> float:
        """The rank's part of all rows of the steps from ``first`` up to, but without, ``last``."""
        total = self._used(last) - self._used(first)
        return self.rows_between(rank, first, last) / total if total else 0.0

    def _used(self, number: int) -> int:
        passes, step = divmod(number, max(self.pass_steps, 1))
        return passes * self._total + min(step * self.global_rows, self._total)

    def lengths_of_pass(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a rank before each step of a pass, and in the end; and in each step."""
        return self._before[:, rank], self._at[:, rank]

    def runs_of_pass(self, rank: int) -> list[BatchRun]:
        """Steps of a rank's pass, each for itself."""
        starts, counts = self._before[:-1, rank].tolist(), self._at[:, rank].tolist()
        return [BatchRun(start, 1, count) for start, count in zip(starts, counts, strict=True)]


def elastic_plan(
    piece_counts: Sequence[np.ndarray],
    *,
    batch_size: int,
    global_rows: int,
    validation_fraction: float,
    is_marked: bool,
    steps_per_epoch: int | None = None,
    most_steps: int | None = None,
) -> ElasticPlan:
    """Returns the plan that all ranks compute alike from what each has of every virtual shard.

    Args:
        piece_counts: By rank, the rows of each virtual shard, and those of them that are marked for validation: int64
            of shape (pieces, 2).
        batch_size: Rows of a batch of validation.
        global_rows: Rows of all ranks in a step.
        validation_fraction: Share of the rows kept for validation, where none are marked.
        is_marked: Whether a column marks those that are.
        steps_per_epoch: Steps of an epoch; None means those of a pass.
        most_steps: Steps of an epoch, and of a validation, at most; None does not limit them.

    Raises:
        TrainingError: Several ranks have rows of one virtual shard.
    """
    counts = np.stack(piece_counts)
    rows = counts[:, :, 0]
    if np.any(np.count_nonzero(rows, axis=0) > 1):
        piece = int(np.flatnonzero(np.count_nonzero(rows, axis=0) > 1)[0])
        having = np.flatnonzero(rows[:, piece]).tolist()
        raise TrainingError(
            f"expected each virtual shard of an elastic fit on one rank. Received: rows of shard {piece} on ranks "
            f"{', '.join(map(str, having))}. Rows whose values change when Spark computes them again, as with rand(), "
            "cannot be dealt: write them to a table, or cache them, first."
        )
    owners, sizes = rows.argmax(axis=0), rows.sum(axis=0)
    marked = counts[:, :, 1].sum(axis=0)
    kept = marked if is_marked else np.array(split_validation(sizes.tolist(), validation_fraction), np.int64)
    ranks = range(len(piece_counts))
    training, validation = ([int(part[owners == rank].sum()) for rank in ranks] for part in (sizes - kept, kept))
    return ElasticPlan(
        training_rows=tuple(training),
        validation_rows=tuple(validation),
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        most_steps=most_steps,
        piece_rows=tuple((sizes - kept).tolist()),
        piece_validation=tuple(kept.tolist()),
        owners=tuple(owners.tolist()),
        global_rows=global_rows,
    )


def piece_counts(pieces: np.ndarray, marked: np.ndarray, number: int) -> np.ndarray:
    """Returns the rows that a rank has of each virtual shard, as `elastic_plan` takes them.

    Args:
        pieces: Virtual shard of each row.
        marked: Positions of the rows that are marked for validation.
        number: How many virtual shards there are.

    >>> piece_counts(np.array([1, 1, 0]), np.array([2]), 3).tolist()
    [[1, 1], [2, 0], [0, 0]]
    """
    return np.stack([np.bincount(part, minlength=number) for part in (pieces, pieces[marked])], axis=1).astype(np.int64)


def validation_places(pieces: np.ndarray, kept: Sequence[int], *, seed: int) -> np.ndarray:
    """Returns the places of a rank's validation rows, sorted, among its rows in the order of their pieces.

    Which rows they are follows from the rows of a piece, in the order of their content, and not from ranks.

    Args:
        pieces: Virtual shard of each of the rank's rows, in ascending order.
        kept: Rows for validation of each virtual shard.
    """
    drawn = [np.empty(0, np.int64)]
    for piece in np.unique(pieces).tolist():
        first, last = np.searchsorted(pieces, [piece, piece + 1])
        drawn.append(int(first) + random_rows(seed, piece, int(last - first), kept[piece]))
    return np.concatenate(drawn)


class PieceOrder:
    """Order in which the passes of a rank use the rows of its virtual shards.

    Args:
        rows: Positions of the rank's rows to train on, by virtual shard, each in the order of their content.
        plan: The steps.
        rank: The rank.
        seed: Source of the order.
        shuffle: Whether each pass has another one; otherwise rows come by their content in all of them.

    >>> plan = ElasticPlan((4,), (0,), 3, piece_rows=(3, 1), owners=(0, 0), global_rows=3)
    >>> order = PieceOrder({0: np.array([5, 6, 7]), 1: np.array([4])}, plan, 0, seed=0, shuffle=False)
    >>> order.of_pass(0).tolist()
    [5, 6, 4, 7]
    """

    def __init__(
        self, rows: Mapping[int, np.ndarray], plan: ElasticPlan, rank: int, *, seed: int, shuffle: bool
    ) -> None:
        self._rows = {piece: rows[piece] for piece in sorted(rows) if len(rows[piece])}
        self._seed = seed
        self._shuffle = shuffle
        steps = np.arange(plan.pass_steps)
        counts = np.diff(plan.piece_ends(list(self._rows)), axis=0)
        of_rows = [np.repeat(steps, column) for column in counts.T]
        # Sizes are those of every pass, and so is the step of each place in a piece's order.
        self._places = np.argsort(np.concatenate([np.empty(0, np.int64), *of_rows]), kind="stable")

    def of_pass(self, number: int) -> np.ndarray:
        """Returns the positions of all rows, in the order in which a pass uses them.

        Args:
            number: The pass, from zero over the whole fit.
        """
        orders = [
            rows[row_order(self._seed, number, piece, len(rows), shuffle=self._shuffle)]
            for piece, rows in self._rows.items()
        ]
        return np.concatenate([np.empty(0, np.int64), *orders])[self._places]
