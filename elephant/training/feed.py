"""The batches that a rank puts into ``model.fit`` and into validation.

Rows are read from the shard some megabytes at a time, in the order that the plan
gives, and cut into batches afterwards: to go through Python for every batch takes
longer than a small model's step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from elephant.config import FitConfig
from elephant.data.content_order import content_order
from elephant.data.epoch_plan import EpochPlan, Run, random_rows, row_order, runs_of_epoch
from elephant.data.schema import RowSpec
from elephant.data.shard import Shard
from elephant.data.values import Values
from elephant.training.prepared_rows import BatchChanges
from elephant.training.tensors import Tensors

# Of the rows that are read at once. Three times as much is held: what is read, what waits, what is cut.
_RUN_BYTES = 8 << 20

# Where batches are read one by one.
_BATCHES_AHEAD = 4

Arrays = tuple[np.ndarray, ...]


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
        self._changes = changes if changes is not None and changes.any else None
        self._changed = shard if self._changes is None else self._changes.rows
        self._plan = plan
        self._config = config
        self._rank = rank
        self._tensors = Tensors(self._changed)
        rows = _delivered_or_by_content(shard, config)
        marked = np.zeros(shard.num_rows, bool)
        marked[shard.validation_rows()] = True
        if not marked.any():
            marked[rows[random_rows(config.seed, rank, shard.num_rows, plan.validation_rows[rank])]] = True
        self._validation_rows = rows[marked[rows]]
        self._training_rows = rows[~marked[rows]]
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
        runs = self._runs(len(self._training_rows), self._plan.steps)
        ends = np.cumsum([run.batches for run in runs])
        first_run = int(np.searchsorted(ends, first_step, side="right"))
        within = first_step - int(ends[first_run] - runs[first_run].batches)
        epochs = _Epochs(first_epoch, self._epoch_rows)

        def read(index: int) -> Arrays:
            epoch, place = divmod(int(index) + first_run, len(runs))
            part = self._read(epochs.order_of(epoch), runs[place], (first_epoch + epoch, place))
            return tuple(array[within:] for array in part) if index == 0 and within else part

        return self._batches(read, None)

    def validation_batches(self) -> Any:
        """Returns the validation rows once, in order, in a form that Keras' evaluate takes."""
        if self._validation is None or isinstance(self._validation, Iterator):
            rows = self._validation_rows
            runs = self._runs(len(rows), self._plan.validation_steps(self._rank))
            read = self._read
            self._validation = self._batches(lambda index: read(rows, runs[int(index)], (None, int(index))), len(runs))
        return self._validation

    def _runs(self, num_rows: int, steps: int) -> list[Run]:
        longest = 1
        if self._tensors.are_fixed and self._changes is None:
            batch_bytes = self._config.batch_size * sum(array.nbytes for array in self._tensors.arrays(self._stand_in))
            longest = max(_RUN_BYTES // batch_bytes, 1)
        return runs_of_epoch(num_rows, self._config.batch_size, steps, longest=longest)

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        config, rows = self._config, self._training_rows
        return rows[row_order(config.seed, epoch, self._rank, len(rows), shuffle=config.shuffle)]

    def _validated(self, values: tuple[Values, ...], batch: int) -> tuple[Values, ...]:
        return values if self._changes is None else self._changes.validation(values, batch)

    def _read(self, order: np.ndarray, run: Run, place: tuple[int | None, int]) -> Arrays:
        """Returns a run's arrays, of shape (batches, rows, ...); of rows of different space one batch's.

        Args:
            order: Positions of the rows.
            run: Which of them.
            place: The epoch, None of validation, and the number of the run, which is one batch where it is changed.
        """
        if run.rows == 0:
            arrays = self._tensors.arrays(self._stand_in)
            if not self._tensors.are_fixed:
                return tuple(arrays)
            return tuple(np.repeat(array[np.newaxis], run.batches, axis=0) for array in arrays)
        taken = self._shard.take(order[run.start : run.start + run.batches * run.rows])
        epoch, number = place
        if epoch is None:
            taken = self._validated(taken, number)
        elif self._changes is not None:
            taken = self._changes.training(taken, epoch, number)
        arrays = self._tensors.arrays(taken)
        if not self._tensors.are_fixed:
            return tuple(arrays)
        return tuple(array.reshape(run.batches, run.rows, *array.shape[1:]) for array in arrays)

    def _batches(self, read: Callable[[int], Arrays], count: int | None) -> Any:
        if keras.backend.backend() == "tensorflow":
            return _dataset(read, count, self._tensors)
        indices = itertools.count() if count is None else range(count)
        return _each(read, indices, self._tensors)


def _delivered_or_by_content(shard: Shard, config: FitConfig) -> np.ndarray:
    """Returns the positions of all rows in the order that everything else is drawn from.

    A worker that is run again goes on where its predecessor ended, and must meet the same rows there.
    """
    if config.mode == "synchronous" or not config.shuffle:
        return np.arange(shard.num_rows)
    return content_order(shard)


class _Epochs:
    """The row order of the epoch that is being read."""

    def __init__(self, first: int, rows: Callable[[int], np.ndarray]) -> None:
        self._first = first
        self._rows = rows
        self._current = (-1, np.empty(0, dtype=np.int64))

    def order_of(self, epoch: int) -> np.ndarray:
        """Returns the rows of the epoch, counted from the first one, in their order."""
        if self._current[0] != epoch:
            self._current = (epoch, self._rows(self._first + epoch))
        return self._current[1]


def _each(read: Callable[[int], Arrays], indices: Iterable[int], tensors: Tensors) -> Iterator[tuple[Any, ...]]:
    for index in indices:
        run = read(index)
        yield from map(tensors.assembled, zip(*run, strict=True) if tensors.are_fixed else [run])


def _dataset(read: Callable[[int], Arrays], count: int | None, tensors: Tensors) -> Any:
    """Returns the batches as a ``tf.data.Dataset``: one call into Python per run, which goes on beside the steps.

    Args:
        read: Returns the arrays of the run with this number.
        count: How many runs there are; None for no end.
        tensors: Makes of the arrays what the model takes.
    """
    import tensorflow as tf

    signature = tensors.signature()

    def load(index: Any) -> tuple[Any, ...]:
        parts = tf.numpy_function(read, [index], [tf.as_dtype(dtype) for dtype, _ in signature], stateful=True)
        for part, (_, shape) in zip(parts, signature, strict=True):
            part.set_shape((None, *shape) if tensors.are_fixed else shape)
        return tuple(parts) if tensors.are_fixed else tensors.assembled(parts)

    indices = tf.data.Dataset.counter() if count is None else tf.data.Dataset.range(count)
    # The next run is read while the model works on this one.
    batches = indices.map(load).prefetch(1 if tensors.are_fixed else _BATCHES_AHEAD)
    if tensors.are_fixed:
        batches = batches.flat_map(lambda *parts: tf.data.Dataset.from_tensor_slices(tensors.assembled(parts)))
    options = tf.data.Options()
    # There is nothing to tune, and the tuning takes a thread.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return batches.with_options(options)
