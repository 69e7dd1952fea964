"""The batches that a rank puts into ``model.fit`` and into validation.

Rows are read from the shard some megabytes at a time, in the order that the pass
has, and cut into batches afterwards: to go through Python for every batch takes
longer than a small model's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from elephant.config import FitConfig
from elephant.data.content_order import content_order
from elephant.data.epoch_plan import EpochPlan, Run, random_rows, runs_of_pass
from elephant.data.ragged import Values
from elephant.data.schema import RowSpec
from elephant.data.shard import Shard
from elephant.data.shuffling import are_few
from elephant.training.prefetch import Arrays, batches_read_ahead
from elephant.training.prepared_rows import BatchChanges
from elephant.training.tensors import Tensors
from elephant.training.training_rows import TrainingRows

# Of the rows that are read at once. Three times as much is held: what is read, what waits, what is cut.
_RUN_BYTES = 8 << 20


class Feed:
    """Draws a rank's batches from its shard as the plan says.

    Args:
        shard: The rank's rows.
        plan: The steps of an epoch.
        config: Gives seed, shuffling and batch size.
        rank: Whose batches these are.
        changes: What is made of the batches; None leaves them as the shard holds them.
    """

    def __init__(
        self, shard: Shard, plan: EpochPlan, config: FitConfig, rank: int, changes: BatchChanges | None = None
    ) -> None:
        self._shard = shard
        self._plan = plan
        self._config = config
        self._rank = rank
        self._changes = changes if changes is not None and changes.any else None
        # What batches are when they have been changed.
        self._changed = shard if self._changes is None else self._changes.rows
        self._tensors = Tensors(self._changed)
        # None where rows are drawn from the order in which they were delivered.
        self._content = content_order(shard) if _needs_content_order(config) else None
        self._taken = self._validation_places()
        self._stand_in = self._changed.zeros(1)
        if shard.num_rows:
            self._stand_in = self._validated(shard.take(np.zeros(1, dtype=np.int64)), 0)
        self._validation: Any = None

    @property
    def rows(self) -> RowSpec:
        """What one row of the model's input is."""
        return self._changed.schema.row_spec(self._changed.row_shapes)

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Natural shape of a row of each array column, by role."""
        return self._changed.row_shapes

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
        in_runs = self._tensors.are_fixed and self._changes is None
        rows = self._training_rows()
        runs = self._runs(rows.count, self._plan.pass_steps, in_runs=in_runs)
        ends = np.cumsum([run.batches for run in runs])
        first_run = int(np.searchsorted(ends, step, side="right"))
        within = step - int(ends[first_run] - runs[first_run].batches)

        def read(index: int) -> Arrays:
            number, place = divmod(int(index) + first_run, len(runs))
            run, values = runs[place], self._stand_in
            if run.rows:
                values = rows.read(first_pass + number, run.start, run.start + run.batches * run.rows)
            if self._changes is not None and run.rows:
                values = self._changes.training(values, *divmod(first_number + int(index), self._plan.steps))
            arrays = self._tensors.arrays(values)
            if not in_runs:
                return tuple(arrays)
            part = self._as_run(arrays, run)
            return tuple(array[within:] for array in part) if index == 0 and within else part

        return batches_read_ahead(read, None, self._tensors, in_runs=in_runs)

    def first_rows(self, most: int) -> tuple[Any, Any, Any] | None:
        """Returns some of this rank's rows as a batch: ``x``, ``y`` and ``sample_weight``; None where there are none.

        Args:
            most: Rows at most.
        """
        count = min(most, self._shard.num_rows, self._config.batch_size)
        if count == 0:
            return None
        values = self._shard.take(np.arange(count))
        if self._changes is not None:
            values = self._changes.training(values, 0, 0)
        return self._tensors.of(values)

    def validation_batches(self) -> Any:
        """Returns the validation rows once, in order, in a form that Keras' evaluate takes."""
        if self._validation is None or isinstance(self._validation, Iterator):
            in_runs = self._tensors.are_fixed and self._changes is None
            steps = self._plan.validation_steps(self._rank)
            runs = self._runs(len(self._taken), steps, in_runs=in_runs)

            def read(index: int) -> Arrays:
                run = runs[int(index)]
                places = self._taken[run.start : run.start + run.batches * run.rows]
                arrays = self._tensors.arrays(self._validated(self._kept(places), int(index)))
                return self._as_run(arrays, run) if in_runs else tuple(arrays)

            self._validation = batches_read_ahead(read, len(runs), self._tensors, in_runs=in_runs)
        return self._validation

    def _training_rows(self) -> TrainingRows:
        return TrainingRows(self._shard, self._config, self._rank, self._taken, self._content)

    def _validation_places(self) -> np.ndarray:
        """Returns the places of the validation rows in the order that everything is drawn from, sorted."""
        shard, config, rank = self._shard, self._config, self._rank
        marked = shard.validation_rows()
        if not len(marked):
            return random_rows(config.seed, rank, shard.num_rows, self._plan.validation_rows[rank])
        if self._content is None:
            return marked
        return np.flatnonzero(np.isin(self._content, marked))

    def _kept(self, places: np.ndarray) -> tuple[Values, ...]:
        """Returns validation rows."""
        positions = places if self._content is None else self._content[places]
        if self._config.cache == "memory" or are_few(self._shard.num_bytes):
            return self._shard.take(positions)
        return self._shard.hold(np.sort(positions)).take(positions)

    def _runs(self, num_rows: int, steps: int, *, in_runs: bool) -> list[Run]:
        longest = 1
        if in_runs:
            batch_bytes = self._config.batch_size * sum(array.nbytes for array in self._tensors.arrays(self._stand_in))
            longest = max(_RUN_BYTES // batch_bytes, 1)
        return runs_of_pass(num_rows, self._config.batch_size, steps, longest=longest)

    def _validated(self, values: tuple[Values, ...], batch: int) -> tuple[Values, ...]:
        return values if self._changes is None else self._changes.validation(values, batch)

    def _as_run(self, arrays: list[np.ndarray], run: Run) -> Arrays:
        """Returns a run's arrays in the shape (batches, rows, ...)."""
        if run.rows == 0:
            return tuple(np.repeat(array[np.newaxis], run.batches, axis=0) for array in arrays)
        return tuple(array.reshape(run.batches, run.rows, *array.shape[1:]) for array in arrays)


def _needs_content_order(config: FitConfig) -> bool:
    """Returns whether rows are drawn from an order that their values decide, not from that of their delivery.

    A worker that is run again goes on where its predecessor ended, and must meet the same rows there; so must
    the ranks of a fit that goes on from a checkpoint.
    """
    return config.shuffle and (config.mode != "synchronous" or config.checkpoint_path is not None)
