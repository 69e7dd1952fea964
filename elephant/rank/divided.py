"""Synchronous training of a model whose layers are divided among the ranks: all take the same steps on all rows.

To Keras that is one process with many devices. So there is nothing to average: each rank has the rows of all ranks in
every step, and the numbers of an epoch are those of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from elephant.backends.base import ModelDistribution
from elephant.backends.gradient_averager import StopSignal
from elephant.collective import api
from elephant.collective.communicator import Communicator, LocalCommunicator
from elephant.data.epoch_plan import EpochPlan
from elephant.data.shard import Shard
from elephant.modeling.variables import read_variables, state_variables
from elephant.rank.callbacks.rank_callbacks import (
    GlobalEpoch,
    require_averaged_weights,
    require_equal_weights,
    share_variables,
)
from elephant.rank.callbacks.shared_state import outside_here, read
from elephant.rank.checkpoints import restore
from elephant.rank.input.feed import BatchFeed
from elephant.rank.input.preprocessed_shard import prepared_rows
from elephant.rank.job import Reporter, TrainingJob, mixed_policy, prepared_model, set_up_process
from elephant.rank.rank_progress import RankWeight
from elephant.rank.synchronous import callbacks_of_fit
from elephant.rank.traced_step import leave_loops


class WholeModel(keras.callbacks.Callback):
    """Has a model in one piece while callbacks look at it, and in parts while it computes.

    Args:
        world: All ranks.
        is_looked_at: Whether anybody looks at the model before training has ended.
    """

    def __init__(self, distribution: ModelDistribution, world: Communicator, *, is_looked_at: bool) -> None:
        super().__init__()
        self._distribution = distribution
        self._world = world
        self._is_looked_at = is_looked_at
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._gather(self._is_looked_at)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._distribution.is_divided:
            model = self.model
            require_equal_weights(model, self._world, self._epoch)
            self._distribution.divide(model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._gather(self._is_looked_at)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._gather(True)

    def _gather(self, is_looked_at: bool) -> None:
        if is_looked_at and self._distribution.is_divided:
            self._distribution.gather(self.model)


class GlobalBatches:
    """Batches with the rows of all ranks, rank after rank, as each has them in its own batches.

    Args:
        feed: Batches of this rank.
        plan: How many rows each rank has.
        world: All ranks.
    """

    def __init__(self, feed: BatchFeed, plan: EpochPlan, world: Communicator) -> None:
        self._feed = feed
        self._plan = plan
        self._world = world

    def training(self, first_epoch: int) -> Iterator[Any]:
        """Returns the batches of all epochs in turn, without end, as `BatchFeed.training_batches`."""
        first = self._plan.number(first_epoch, 0)
        for number, batch in enumerate(self._feed.training_batches(first_epoch=first_epoch), first):
            yield self._joined(batch, self._plan.rows_at(self._world.rank, number))

    def validation(self) -> Iterator[Any]:
        """Returns the validation rows once, as `BatchFeed.validation_batches`."""
        rank, size = self._world.rank, self._plan.batch_size
        own, rows = iter(self._feed.validation_batches()), self._plan.validation_rows[rank]
        for step in range(max(map(self._plan.validation_steps, range(self._plan.world_size)))):
            count = min(max(rows - step * size, 0), size)
            yield self._joined(next(own) if count else self._feed.stand_in(), count)

    def _joined(self, batch: Any, rows: int) -> Any:
        leaves = [np.ascontiguousarray(leaf[:rows]) for leaf in map(np.asarray, keras.tree.flatten(batch))]
        shapes = self._world.allgather(np.array([size for leaf in leaves for size in leaf.shape], np.int64))
        blocks = self._world.allgather(np.concatenate([leaf.reshape(-1).view(np.uint8) for leaf in leaves]))
        parts = [_arrays_of(block, numbers, leaves) for block, numbers in zip(blocks, shapes, strict=True)]
        return keras.tree.pack_sequence_as(batch, [_stacked(column) for column in zip(*parts, strict=True)])


def _arrays_of(block: np.ndarray, numbers: np.ndarray, like: list[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays whose bytes follow each other in a block, of the dtypes and dimensions of others."""
    arrays, sizes, start = [], iter(numbers.tolist()), 0
    for leaf in like:
        shape = [next(sizes) for _ in leaf.shape]
        stop = start + int(np.prod(shape)) * leaf.itemsize
        arrays.append(block[start:stop].view(leaf.dtype).reshape(shape))
        start = stop
    return arrays


def _stacked(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Returns the rows of several arrays as one; sequences are filled up with zeros, as those of one batch are."""
    parts = tuple(part for part in parts if len(part)) or parts[:1]
    widest = np.max([part.shape for part in parts], axis=0)[1:]
    missing = [
        [(0, 0), *((0, most - size) for most, size in zip(widest, part.shape[1:], strict=True))] for part in parts
    ]
    return np.concatenate([np.pad(part, more) for part, more in zip(parts, missing, strict=True)])


def train_divided(
    job: TrainingJob,
    shard: Shard,
    plan: EpochPlan,
    world: Communicator,
    reporter: Reporter,
    distribution: ModelDistribution,
) -> None:
    """Trains one rank to the end and reports the trained variables of the whole model from rank 0.

    Args:
        plan: The steps of all ranks, as for ranks that average gradients.
        world: All ranks.
        distribution: Divides the model, and runs this function.

    Raises:
        NetworkError: Another rank is gone.
        ConfigurationError: The model cannot be divided so.
        Exception: Whatever the model or a callback raises.
    """
    set_up_process()
    outside = outside_here(job.outside, job.callbacks, job.model, job.preprocessing.given)
    job = replace(job, outside=outside)
    shard, changes = prepared_rows(job, shard, world, world.rank)
    feed = BatchFeed(shard, plan, job.config, world.rank, changes, job.class_weight)
    alone = LocalCommunicator()
    with distribution.on_host():
        model = _prepared_model(job, feed, plan, world)
    require_averaged_weights(model, job.callbacks)
    # The rank with most rows has some in every step; to Keras, all ranks together are that one.
    steps = replace(plan, training_rows=(max(plan.training_rows),), validation_rows=(max(plan.validation_rows),))
    weight, batches = RankWeight(steps, 0), GlobalBatches(feed, plan, world)
    with changes.own_errors(), api.exchanging(alone, weight, lambda: weight.in_step):
        distribution.begin(model)
        callbacks = callbacks_of_fit(
            job,
            feed,
            plan,
            world,
            alone,
            weight,
            StopSignal(),
            reporter,
            epoch_end=functools.partial(GlobalEpoch, alone, weight, batches.validation),
            whole=WholeModel(distribution, world, is_looked_at=is_looked_at(job)),
        )
        model.fit(
            batches.training(job.first_epoch),
            initial_epoch=job.first_epoch,
            epochs=job.config.epochs,
            steps_per_epoch=plan.steps,
            callbacks=callbacks,
            shuffle=False,  # the feed has done it
            verbose=0,
        )
    if world.rank == 0:
        reporter.result([*read_variables(model), *map(read, job.outside)], feed.rows)


def _prepared_model(job: TrainingJob, feed: BatchFeed, plan: EpochPlan, world: Communicator) -> keras.Model:
    model = prepared_model(job, feed.rows, num_ranks=plan.world_size, policy=mixed_policy(job.config))
    share_variables(state_variables(model), world)
    restore(model, job, LocalCommunicator())
    leave_loops(model, plan, job.config.frequency)
    return model


def is_looked_at(job: TrainingJob) -> bool:
    """Returns whether callbacks or checkpoints see the model before training has ended; the same on all ranks."""
    on_ranks = [one for one in job.callbacks if type(one) is not keras.callbacks.Callback]
    others = (job.driver_reads, job.state, job.config.keeps_states or None)
    return bool(on_ranks or job.outside) or any(one is not None for one in others)
