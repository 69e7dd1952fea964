"""Batches of a rank, in the order of the epoch plan: read from its shard, held, and made ahead.

Rows are read from the shard some megabytes at a time, in the order that the pass
has, and cut into batches afterwards: to go through Python for every batch takes
longer than a small model's step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from elephant.backends import current
from elephant.backends.base import Arrays
from elephant.config import FitConfig
from elephant.data.epoch_plan import BatchRun, EpochPlan, random_rows, runs_of_pass
from elephant.data.ragged import RaggedArray, Values, joined, take_rows
from elephant.data.schema import RAGGED, RowSpec
from elephant.data.shard import Shard, content_hashes
from elephant.data.shuffling import (
    POOL_BATCHES,
    Blocks,
    PassOrder,
    ShuffleBuffer,
    are_few,
    blocks_of,
    left_over,
    order_by_length,
)
from elephant.data.virtual_shards import ElasticPlan, validation_places
from elephant.rank.input.piece_reader import PieceReader, with_stand_ins
from elephant.rank.input.preprocessed_shard import BatchChanges
from elephant.rank.input.tensors import Tensors

Columns = tuple[Values, ...]

# Bytes of the rows that are read at once. Three times as much is held: what is read, what waits, what is cut.
_RUN_BYTES = 8 << 20


class TrainingRows:
    """Reads pieces of passes; one after the other, since the memory of what comes next is that of what was.

    Few rows are taken from the shard as they come. Of many, one window of the pass at a time is held in memory.

    Args:
        content: The positions of all rows in the order that places count in; None where that is the shard's own.
    """

    def __init__(
        self, shard: Shard, config: FitConfig, rank: int, taken: np.ndarray, content: np.ndarray | None
    ) -> None:
        self._shard = shard
        self._config = config
        self._rank = rank
        self._taken = taken
        self._content = content
        self.count = shard.num_rows - len(taken)
        # Preprocessing may have made rows of one length of sequences: these are read in runs that no pool holds.
        has_sequences = any(field.kind == RAGGED for field in shard.schema.batch_fields)
        self._has_buckets = config.bucket_by_length and has_sequences
        self._blocks = Blocks(max(self.count, 1), 1)
        if config.cache == "disk" and shard.num_rows:
            self._blocks = blocks_of(self.count, shard.num_bytes * self.count // shard.num_rows)
        self._order: tuple[int, PassOrder | None] = (-1, None)
        self._buffer: ShuffleBuffer | None = None
        self._pool: tuple[tuple[int, int], Columns] = ((-1, -1), ())

    def read(self, number: int, start: int, stop: int) -> Columns:
        """Returns the rows that a pass uses from its ``start``-th up to, but without, its ``stop``-th one.

        Args:
            number: The pass, from zero over the whole fit.
            start: A batch's first row, where batches are made by length.
        """
        size = self._config.rank_batch_size
        whole = self.count // size * size
        if not self._has_buckets or start >= whole:
            return self._rows(number, start, stop)
        pool, place = divmod(start, POOL_BATCHES * size)
        if self._pool[0] != (number, pool):
            first = pool * POOL_BATCHES * size
            rows = self._rows(number, first, min(first + POOL_BATCHES * size, whole))
            self._pool = ((number, pool), self._by_length(rows, number, pool))
        return _rows_of(self._pool[1], np.arange(place, place + stop - start), self._shard)

    def _by_length(self, columns: Columns, number: int, pool: int) -> Columns:
        fields = self._shard.schema.batch_fields
        lengths = [
            np.diff(values.offsets)
            for field, values in zip(fields, columns, strict=True)
            if field.kind == RAGGED and isinstance(values, RaggedArray)
        ]
        key = (self._config.seed, number, self._rank, pool) if self._config.shuffle else None
        return _rows_of(
            columns, order_by_length(np.sum(lengths, axis=0), self._config.rank_batch_size, key), self._shard
        )

    def _rows(self, number: int, start: int, stop: int) -> Columns:
        order = self._order_of(number)
        source = self._shard if self._is_whole else self
        parts = [source.take(self._positions(rows)) for rows in order.parts(start, stop)]
        return parts[0] if len(parts) == 1 else tuple(joined(column) for column in zip(*parts, strict=True))

    @property
    def _is_whole(self) -> bool:
        return self._blocks.rows >= self.count

    def take(self, positions: np.ndarray) -> Columns:
        """Returns rows of the window that is held, by their positions in the shard."""
        if self._buffer is None:
            raise ValueError("expected a window that has begun.")
        return self._buffer.take(positions)

    def _positions(self, rows: np.ndarray) -> np.ndarray:
        places = left_over(rows, self._taken) if len(self._taken) else rows
        return places if self._content is None else self._content[places]

    def _order_of(self, number: int) -> PassOrder:
        if self._order[0] == number and self._order[1] is not None:
            return self._order[1]

        def entered(window: int, rows: np.ndarray) -> None:
            if not self._is_whole:
                self._begin(order, window, rows)

        key = (self._config.seed, number, self._rank)
        order = PassOrder(*key, self.count, self._blocks, shuffle=self._config.shuffle, entered=entered)
        self._order = (number, order)
        return order

    def _begin(self, order: PassOrder, window: int, rows: np.ndarray) -> None:
        """Reads a window into memory, and has the system read the next one from the disk meanwhile."""
        self._buffer = self._shard.hold(np.sort(self._positions(rows)), self._buffer)
        self._shard.forget()
        if self._content is None:
            for first, last in order.blocks_of_window(window + 1):
                start, stop = left_over(np.array([first, last - 1]), self._taken)
                self._shard.expect(int(start), int(stop) + 1)


def _rows_of(columns: Columns, rows: np.ndarray, shard: Shard) -> Columns:
    fields = zip(shard.schema.batch_fields, columns, strict=True)
    return tuple(take_rows(values, rows, shard.items_per_row(field)) for field, values in fields)


class BatchFeed:
    """Draws a rank's batches from its shard as the plan says.

    Args:
        changes: What is made of the batches; None leaves them as the shard holds them.
        class_weight: Weight of each class in training, from zero on; see `Tensors`.

    Attributes:
        digest: Number of the rank's rows, and a sum of their hashes, int64 of shape (2,): of rows that are shuffled
            whatever their order is, and of others with their order. Without checkpoints nobody asks, and it is zero.
        waited_s: Seconds so far in which steps waited for their rows, as far as `step_ended` was told of them.
    """

    def __init__(
        self,
        shard: Shard,
        plan: EpochPlan,
        config: FitConfig,
        rank: int,
        changes: BatchChanges | None = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._changes = changes if changes is not None and changes.any else None
        self._class_weight = class_weight
        self.digest = np.zeros(2, np.int64)
        self.waited_s = 0.0
        self.draw_from(shard, plan)

    def draw_from(self, shard: Shard, plan: EpochPlan) -> None:
        """Draws from other rows from here on; batches have to be asked for anew.

        Args:
            shard: The rows. The ones before are not closed: what reads ahead may still be at them.
            plan: The steps.
        """
        config = self._config
        self._shard = shard
        self._plan = plan
        # What batches are when they have been changed.
        self._changed = shard if self._changes is None else self._changes.row_shard
        self._tensors = Tensors(self._changed)
        self._training_tensors = Tensors(self._changed, self._class_weight)
        # None where rows are drawn from the order in which they were delivered.
        self._content = None
        self._pieces = shard.pieces()
        if config.keeps_states or _needs_content_order(config):
            hashes = content_hashes(shard)
            is_any_order = config.shuffle or config.elastic is not None
            places = np.uint64(1) if is_any_order else 2 * np.arange(len(hashes), dtype=np.uint64) + np.uint64(1)
            self.digest[:] = len(hashes), np.sum(hashes * places).view(np.int64)
            if _needs_content_order(config):
                by_piece = (hashes, self._pieces) if len(self._pieces) else (hashes,)
                self._content = np.lexsort(by_piece)
        self._taken = self._validation_places()
        stand_ins = current().stand_in_rows
        self._stand_in = self._changed.zeros(stand_ins)
        if shard.num_rows:
            self._stand_in = self._validated(shard.take(np.zeros(stand_ins, dtype=np.int64)), 0)
        self._validation: Any = None
        # When the rows of a run were there, by the number of its first step since the batches began.
        self._ready_at: dict[int, float] = {}
        self._steps = 0

    def step_ended(self, began: float, steps: int = 1) -> None:
        """Counts how long a step of training stood still for its rows, which another thread reads ahead.

        Args:
            began: When it did, as `time.monotonic` has it.
            steps: Steps that were taken as one.
        """
        for _ in range(steps):
            self.waited_s += max(self._ready_at.pop(self._steps, began) - began, 0.0)
            self._steps += 1

    @property
    def plan(self) -> EpochPlan:
        """The steps."""
        return self._plan

    @property
    def shard(self) -> Shard:
        """The rows."""
        return self._shard

    @property
    def rows(self) -> RowSpec:
        """Spec of one row of the model's input."""
        return self._changed.schema.row_spec(self._changed.row_shapes)

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Natural shape of a row of each array column, by role."""
        return self._changed.row_shapes

    def stand_in(self) -> Any:
        """Returns a batch of rows that count for nothing, in the form of `validation_batches`."""
        return self._tensors.assembled(self._tensors.arrays(self._stand_in))

    def training_batches(self, first_epoch: int = 0, first_step: int = 0) -> Any:
        """Returns the batches of all epochs in turn, without end, in a form that Keras' fit takes.

        Every epoch has the plan's number of steps. In steps to which this rank brings
        no row there is a stand-in row, whose gradient gets the weight zero.

        Args:
            first_epoch: The epoch to begin with, from zero.
            first_step: The step of it to begin with, from zero.
        """
        first_number = self._plan.number(first_epoch, first_step)
        first_pass, step = divmod(first_number, self._plan.pass_steps)
        # Batches of different lengths are no run.
        in_runs = self._tensors.are_fixed and self._changes is None and not self._plan.varies
        rows, runs = self._training_rows(in_runs=in_runs)
        if isinstance(rows, PieceReader) and self._tensors.are_fixed and self._changes is None:
            return self._batches_of_lengths(rows, first_pass, step)
        ends = np.cumsum([run.batches for run in runs])
        first_run = int(np.searchsorted(ends, step, side="right"))
        within = step - int(ends[first_run] - runs[first_run].batches)
        ready_at: dict[int, float] = {}
        self._ready_at, self._steps = ready_at, 0

        def read(index: int) -> Arrays:
            number, place = divmod(int(index) + first_run, len(runs))
            run, values = runs[place], self._stand_in
            if run.rows:
                values = rows.read(first_pass + number, run.start, run.start + run.batches * run.rows)
            if self._changes is not None and run.rows:
                values = self._changes.training(values, *divmod(first_number + int(index), self._plan.steps))
            arrays = tuple(self._training_tensors.arrays(values))
            if in_runs:
                arrays = self._as_run(list(arrays), run)
                arrays = tuple(array[within:] for array in arrays) if index == 0 and within else arrays
            of_pass = int(ends[place]) - run.batches
            ready_at[max(number * self._plan.pass_steps + of_pass - step, 0)] = time.monotonic()
            return arrays

        return current().batches(read, None, self._training_tensors, in_runs=in_runs)

    def _batches_of_lengths(self, rows: PieceReader, first_pass: int, step: int) -> Any:
        """Returns the batches of all passes from a step of one on, each of its own length; many are read at once."""
        plan, (starts, lengths) = self._plan, rows.lengths
        stand_in = self._training_tensors.arrays(self._stand_in)
        row_bytes = sum(array.nbytes for array in stand_in) // len(stand_in[0])
        together = max(_RUN_BYTES // max(int(lengths.max()) * row_bytes, 1), 1)
        runs_of_pass, first_run = -(-plan.pass_steps // together), step // together
        ready_at: dict[int, float] = {}
        self._ready_at, self._steps = ready_at, 0

        def read(index: int) -> Arrays:
            number, place = divmod(int(index) + first_run, runs_of_pass)
            first = step if index == 0 else place * together
            last = min((place + 1) * together, plan.pass_steps)
            values = rows.read(first_pass + number, int(starts[first]), int(starts[last]))
            arrays = with_stand_ins(self._training_tensors.arrays(values), lengths[first:last], stand_in)
            ready_at[max(number * plan.pass_steps + first - step, 0)] = time.monotonic()
            return tuple(arrays)

        return current().batches(read, None, self._training_tensors, in_runs=True, of_lengths=True)

    def sample(self, most: int, turn: int = 0) -> tuple[Any, Any, Any] | None:
        """Returns rows from all over this rank's shard as a batch: ``x``, ``y`` and ``sample_weight``.

        Args:
            most: Rows at most.
            turn: Every turn has other rows, until all have had theirs.

        Returns:
            The batch; None where there are no rows, or no others.
        """
        total = self._shard.num_rows
        count = min(most, total, max(_RUN_BYTES * total // max(self._shard.num_bytes, 1), 2))
        if self._changes is not None:
            # The user's functions get batches as in training.
            count = min(count, max(self._config.rank_batch_size, 2))
        stride = -(-total // max(count, 1))
        if turn >= stride:
            return None
        values = self._shard.take((np.arange(count) * stride + turn * _far_step(stride)) % total)
        if self._changes is not None:
            values = self._changes.training(values, 0, turn)
        return self._training_tensors.of(values)

    def validation_batches(self) -> Any:
        """Returns the validation rows once, in order, in a form that Keras' evaluate takes."""
        if self._validation is None or isinstance(self._validation, Iterator):
            in_runs = self._tensors.are_fixed and self._changes is None
            steps = self._plan.validation_steps(self._rank)
            runs = self._runs(len(self._taken), steps, in_runs=in_runs)

            def read(index: int) -> Arrays:
                run = runs[int(index)]
                places = self._taken[run.start : run.start + run.batches * run.rows]
                arrays = self._tensors.arrays(self._validated(self._validation_rows(places), int(index)))
                return self._as_run(arrays, run) if in_runs else tuple(arrays)

            self._validation = current().batches(read, len(runs), self._tensors, in_runs=in_runs)
        return self._validation

    def _training_rows(self, *, in_runs: bool) -> tuple[TrainingRows | PieceReader, list[BatchRun]]:
        """Returns a reader of the rows of passes, and the runs of batches that a pass has."""
        shard, plan, config, rank = self._shard, self._plan, self._config, self._rank
        if isinstance(plan, ElasticPlan) and self._content is not None:
            return PieceReader(shard, plan, config, rank, self._content, self._taken), plan.runs_of_pass(rank)
        rows = TrainingRows(shard, config, rank, self._taken, self._content)
        return rows, self._runs(rows.count, plan.pass_steps, in_runs=in_runs)

    def _validation_places(self) -> np.ndarray:
        """Returns the places of the validation rows in the order that everything is drawn from, sorted."""
        shard, config, rank = self._shard, self._config, self._rank
        marked = shard.validation_rows()
        if isinstance(self._plan, ElasticPlan) and self._content is not None and not len(marked):
            return validation_places(self._pieces[self._content], self._plan.piece_validation, seed=config.seed)
        if not len(marked):
            return random_rows(config.seed, rank, shard.num_rows, self._plan.validation_rows[rank])
        if self._content is None:
            return marked
        return np.flatnonzero(np.isin(self._content, marked))

    def _validation_rows(self, places: np.ndarray) -> tuple[Values, ...]:
        """Returns validation rows."""
        positions = places if self._content is None else self._content[places]
        if self._config.cache == "memory" or are_few(self._shard.num_bytes):
            return self._shard.take(positions)
        return self._shard.hold(np.sort(positions)).take(positions)

    def _runs(self, num_rows: int, steps: int, *, in_runs: bool) -> list[BatchRun]:
        longest = 1
        if in_runs:
            stand_in = sum(array.nbytes for array in self._tensors.arrays(self._stand_in))
            batch_bytes = self._config.rank_batch_size * stand_in // current().stand_in_rows
            longest = max(_RUN_BYTES // batch_bytes, 1)
        return runs_of_pass(num_rows, self._config.rank_batch_size, steps, longest=longest)

    def _validated(self, values: tuple[Values, ...], batch: int) -> tuple[Values, ...]:
        return values if self._changes is None else self._changes.validation(values, batch)

    def _as_run(self, arrays: list[np.ndarray], run: BatchRun) -> Arrays:
        """Returns a run's arrays in the shape (batches, rows, ...)."""
        if run.rows == 0:
            return tuple(np.repeat(array[np.newaxis], run.batches, axis=0) for array in arrays)
        return tuple(array.reshape(run.batches, run.rows, *array.shape[1:]) for array in arrays)


def _far_step(stride: int) -> int:
    """Returns a step whose multiples, modulo a stride, are all numbers below it, and far from each other at first.

    >>> [turn * _far_step(8) % 8 for turn in range(8)]
    [0, 5, 2, 7, 4, 1, 6, 3]
    """
    step = max(round(stride * (math.sqrt(5) - 1) / 2), 1)
    return next(one for one in itertools.count(step) if math.gcd(one, stride) == 1)


def _needs_content_order(config: FitConfig) -> bool:
    """Returns whether rows are drawn from an order that their values decide, not from that of their delivery.

    A worker that is run again goes on where its predecessor ended, and must meet the same rows there; so must
    the ranks of a fit that goes on from a checkpoint. Rows of an elastic fit have no other order.
    """
    return config.elastic is not None or (config.shuffle and (not config.is_synchronous or config.keeps_states))
