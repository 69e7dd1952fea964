"""Synchronous training of a model in stages: the ranks of a replica are one model together, and share its rows.

The rows of a replica go to the rank of its first stage, once. A fit is then a loop of steps of a `ModelPipeline`, with
the callbacks of any fit around them. The numbers of an epoch are known where losses are, in the last stage, of which
rank 0 is one; all ranks hear of them, so that callbacks decide alike everywhere.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.gradient_averager import StopSignal
from elephant.backends.keras_private import compiled_loss, compiled_metrics, has_schedule
from elephant.collective import api
from elephant.collective.communicator import Communicator
from elephant.config import FitConfig
from elephant.data.epoch_plan import EpochPlan
from elephant.data.ragged import RaggedArray, Values
from elephant.data.shard import Shard, ShardWriter
from elephant.errors import UnsupportedError
from elephant.modeling.stages import OPTION
from elephant.modeling.variables import parts_of, read_variables
from elephant.rank.callbacks.rank_callbacks import (
    TestCallbacks,
    average_moving_statistics,
    require_equal_weights,
)
from elephant.rank.callbacks.shared_state import outside_here, read
from elephant.rank.checkpoints import restore
from elephant.rank.divided import is_looked_at
from elephant.rank.input.feed import BatchFeed
from elephant.rank.input.preprocessed_shard import prepared_rows
from elephant.rank.job import Reporter, TrainingJob, mixed_policy, prepared_model, reseed, set_up_process
from elephant.rank.metrics.metric_sums import global_logs, sum_metrics
from elephant.rank.rank_progress import RankWeight
from elephant.rank.synchronous import callbacks_of_fit, common_policy
from elephant.rank.trials.coupling import SUM, RankLosses
from elephant.rank.trials.loss_trial import LossTrial, may_couple_rows, try_out
from elephant.rank.trials.row_dependence import MOST_ROWS
from elephant.storage.filesystem import WORK_FOLDER, scratch_folder
from elephant.training.pipeline import ModelPipeline
from elephant.training.schedule import StagePlace
from elephant.training.stage_values import load_stage

# Bytes of the rows that are sent at once.
_PIECE_BYTES = 8 << 20


def rows_of_replica(shard: Shard, place: StagePlace, world: Communicator, config: FitConfig) -> Shard:
    """Hands the rows of a replica to the rank of its first stage; the shard that was given is closed.

    Args:
        shard: The rows that this rank has got.
        place: This rank's.
        world: All ranks.

    Returns:
        On ranks of the first stage the rows of all ranks of the replica, by rank, and on others none.
    """
    if not place.is_first:
        _send_rows(shard, world, place.rank_of(0, place.replica))
        made = Shard(None, shard.schema, shard.row_shapes)
    else:
        folder = Path(tempfile.mkdtemp(prefix="rows-of-replica-", dir=os.environ.get(WORK_FOLDER)))
        with ShardWriter(folder, shard.schema) as writer:
            count = 0
            for stage in reversed(range(1, place.num_stages)):
                count += _receive_rows(writer, shard, world, place.rank_of(stage, place.replica))
            count += _write_rows(writer, shard)
        made = Shard(folder if count else None, shard.schema, shard.row_shapes, in_memory=config.cache == "memory")
        if count:
            made.unlink()
        else:
            folder.rmdir()
    shard.close()
    return made


def _pieces(shard: Shard) -> Iterator[tuple[int, dict[str, Values]]]:
    length = max(_PIECE_BYTES * shard.num_rows // max(shard.num_bytes, 1), 1)
    for start in range(0, shard.num_rows, length):
        stop = min(start + length, shard.num_rows)
        yield stop - start, shard.columns(start, stop)
        shard.forget()


def _write_rows(writer: ShardWriter, shard: Shard) -> int:
    for count, columns in _pieces(shard):
        writer.write_values(columns, count)
    return shard.num_rows


def _send_rows(shard: Shard, world: Communicator, dst: int) -> None:
    for count, columns in _pieces(shard):
        arrays = [array for field in shard.schema for array in _arrays_of(columns[field.role])]
        world.send([np.array([count]), *arrays], dst)
    world.send([np.array([0])], dst)


def _receive_rows(writer: ShardWriter, shard: Shard, world: Communicator, src: int) -> int:
    total = 0
    while True:
        counts, *arrays = world.recv(src)
        if not counts[0]:
            return total
        left, columns = iter(arrays), {}
        for field in shard.schema:
            like = shard.zeros_of(field)
            parts = [next(left) for _ in _arrays_of(like)]
            columns[field.role] = RaggedArray(parts[0], tuple(parts[1:])) if isinstance(like, RaggedArray) else parts[0]
        writer.write_values(columns, int(counts[0]))
        total += int(counts[0])


def _arrays_of(values: Values) -> list[np.ndarray]:
    return [values.offsets, *values.buffers] if isinstance(values, RaggedArray) else [np.ascontiguousarray(values)]


class StageBatches:
    """Batches of a replica, as its pipeline takes them; of ranks that take no rows, nothing.

    Args:
        feed: Has the rows of the replica on the rank of its first stage.
        plan: How many rows each replica has.
    """

    def __init__(self, feed: BatchFeed, plan: EpochPlan, place: StagePlace) -> None:
        self._feed = feed
        self._plan = plan
        self._place = place

    def training(self, first_epoch: int) -> Iterator[tuple[Any, ...]]:
        """Returns inputs, labels and weights of all steps in turn, without end; no rows where the replica has none."""
        if not self._place.is_first:
            while True:
                yield (None, None, None)
        first = self._plan.number(first_epoch, 0)
        for number, batch in enumerate(self._feed.training_batches(first_epoch=first_epoch), first):
            yield _first_rows(batch, self._plan.rows_at(self._place.replica, number))

    def validation(self) -> Iterator[tuple[Any, ...]]:
        """Returns those of the validation rows once."""
        steps, rows = self._plan.validation_steps(self._place.replica), self._plan.validation_rows[self._place.replica]
        batches = iter(self._feed.validation_batches()) if self._place.is_first and steps else iter(())
        for step in range(steps):
            count = min(rows - step * self._plan.batch_size, self._plan.batch_size)
            yield _first_rows(next(batches), count) if self._place.is_first else (None, None, None)


def _first_rows(batch: Any, count: int) -> tuple[Any, ...]:
    cut: Any = keras.tree.map_structure(lambda leaf: keras.ops.convert_to_numpy(leaf)[:count], batch)
    unpacked: tuple[Any, ...] = keras.utils.unpack_x_y_sample_weight(cut)
    return unpacked


class StagedEpoch(keras.callbacks.Callback):
    """Makes the end of an epoch one for all ranks: metrics, moving statistics, validation.

    Args:
        callbacks: Those that hear of a validation.
    """

    def __init__(
        self,
        pipeline: ModelPipeline,
        weight: RankWeight,
        batches: StageBatches,
        world: Communicator,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._weight = weight
        self._batches = batches
        self._world = world
        self._callbacks = TestCallbacks(list(callbacks))
        self._logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs, pipeline, plan = {} if logs is None else logs, self._pipeline, self._weight.plan
        found: dict[str, Any] = {}
        if pipeline.place.is_last:
            known = self.model.get_metrics_result()
            found = global_logs(self.model, pipeline.replicas, known, self._weight())
        average_moving_statistics(pipeline.stage, pipeline.replicas, self._weight.since(0))
        require_equal_weights(pipeline.stage, pipeline.replicas, epoch)
        if sum(plan.validation_rows):
            found |= {f"val_{name}": value for name, value in self._validate().items()}
        logs.update(self._world.broadcast_object(found))
        self._logs = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._logs)

    def _validate(self) -> dict[str, Any]:
        pipeline, results = self._pipeline, dict[str, Any]()
        self._callbacks.on_test_begin()
        self.model.reset_metrics()
        for step, (x, y, weights) in enumerate(self._batches.validation()):
            self._callbacks.on_test_batch_begin(step)
            loss, rows = pipeline.test_on_batch(x, y, weights)
            if pipeline.place.is_last:
                _count_loss(self.model, loss, rows)
            self._callbacks.on_test_batch_end(step, _numbers(self.model) if pipeline.place.is_last else {})
        if pipeline.place.is_last:
            results = sum_metrics(self.model, pipeline.replicas)
        results = self._world.broadcast_object(results)
        self._callbacks.end_test(results)
        return results


def _count_loss(model: keras.Model, loss: float, rows: float) -> None:
    """Has Keras' own mean of the losses, the first metric of a compiled model, count that of some rows."""
    model.metrics[0].update_state(loss, sample_weight=rows)


def _numbers(model: keras.Model) -> dict[str, Any]:
    """Returns the metrics so far, as Keras gives them after a batch."""
    found: dict[str, Any] = model.get_metrics_result()
    return found


class GatheredModel(keras.callbacks.Callback):
    """Puts the model of a pipeline together for callbacks that look at it, and at the end of training.

    Args:
        is_looked_at: Whether anybody looks at the model before training has ended.
    """

    def __init__(self, pipeline: ModelPipeline, *, is_looked_at: bool) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._is_looked_at = is_looked_at

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_looked_at:
            self._pipeline.put_together(optimizer=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._pipeline.put_together(optimizer=True)


class StagedTraining:
    """Loop of a fit, as that of `keras.Model.fit`, in which a pipeline takes the steps.

    Args:
        model: The whole model, whose optimizer callbacks look at and give a learning rate.
    """

    def __init__(self, model: keras.Model, pipeline: ModelPipeline, batches: StageBatches, weight: RankWeight) -> None:
        self._model = model
        self._pipeline = pipeline
        self._batches = batches
        self._weight = weight

    def run(self, first_epoch: int, epochs: int, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Trains up to the last epoch, or to that in which a callback asks to stop."""
        model, plan, logs = self._model, self._weight.plan, dict[str, Any]()
        params = {"verbose": 0, "epochs": epochs, "steps": plan.steps}
        told = keras.callbacks.CallbackList(list(callbacks), add_history=True, model=model, **params)
        batches = self._batches.training(first_epoch)
        model.stop_training = False
        told.on_train_begin()
        # What the model came with, or a checkpoint had.
        self._pipeline.follow_optimizer()
        for epoch in range(first_epoch, epochs):
            model.reset_metrics()
            told.on_epoch_begin(epoch)
            logs = {}
            for step in range(plan.steps):
                told.on_train_batch_begin(step)
                logs = self._take_step(next(batches))
                told.on_train_batch_end(step, logs)
                if model.stop_training:
                    break
            logs = dict(logs)
            told.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if epochs > first_epoch:
            # Where the optimizer keeps averages of weights that the model is to have in the end.
            self._pipeline.optimizer.finalize_variable_values(self._pipeline.stage.trainable_variables)
        told.on_train_end(logs)

    def _take_step(self, batch: tuple[Any, ...]) -> dict[str, Any]:
        model, pipeline = self._model, self._pipeline
        self._follow_rates()
        pipeline.train_on_batch(*batch)
        count_as(model.optimizer, pipeline.optimizer)
        if not pipeline.place.is_last:
            return {}
        rows = self._weight.plan.rows_between(self._weight.rank, self._number, self._number + 1)
        if rows:
            _count_loss(model, pipeline.step_loss / rows, rows)
        return _numbers(model)

    @property
    def _number(self) -> int:
        return self._weight.plan.number(self._weight.epoch, self._weight.step)

    def _follow_rates(self) -> None:
        """Gives the optimizer of the stage the learning rate that callbacks have given that of the model."""
        for whole, own in zip(parts_of(self._model.optimizer), parts_of(self._pipeline.optimizer), strict=True):
            if not has_schedule(whole):
                own.learning_rate.assign(whole.learning_rate)


def count_as(whole: keras.optimizers.Optimizer, own: keras.optimizers.Optimizer) -> None:
    """Has the optimizer of the whole model count the steps that the one of a stage has taken."""
    for one, other in zip(parts_of(whole), parts_of(own), strict=True):
        one.iterations.assign(other.iterations)


def train_staged(job: TrainingJob, shard: Shard, plan: EpochPlan, world: Communicator, reporter: Reporter) -> None:
    """Trains one rank to the end and reports the trained variables of the whole model from rank 0.

    Args:
        shard: The rows that this rank has got.
        plan: The steps of the replicas, the first ranks; see `elephant.rank.job.epoch_plan`.
        world: All ranks.

    Raises:
        NetworkError: Another rank is gone.
        UnsupportedError: The model cannot be trained in stages.
        Exception: Whatever the model or a callback raises.
    """
    set_up_process()
    config, is_whole = job.config, needs_whole(job)
    outside = outside_here(job.outside, job.callbacks, job.model, job.preprocessing.given)
    job = replace(job, outside=outside)
    place = StagePlace(world.rank, config.num_stages, config.num_replicas)
    shard = rows_of_replica(shard, place, world, config)
    shard, changes = prepared_rows(job, shard, world, place.replica)
    # The last rank is one that the plan gives no rows.
    feed = BatchFeed(
        shard, plan, config, place.replica if place.is_first else world.world_size - 1, changes, job.class_weight
    )
    policy = common_policy(mixed_policy(config), world)
    model = prepared_model(job, feed.rows, num_ranks=world.world_size, policy=policy, has_values=is_whole)
    trial = _try_losses_out(model, job, feed) if is_whole and place.is_first else None
    pipeline = ModelPipeline(
        model,
        stages=config.pipeline_stages,
        micro_batches=config.micro_batches,
        communicator=world,
        load=None if is_whole else functools.partial(load_stage, job.model, model),
    )
    reseed(model, config.seed, place.replica, only=pipeline.stage)
    if is_whole:
        restore(model, job, pipeline.replicas)
    else:
        count_as(model.optimizer, pipeline.optimizer)
    if place.is_last and not min(plan.training_rows[: config.num_replicas]):
        _build_metrics(model, feed)
    weight, batches = RankWeight(plan, place.replica), StageBatches(feed, plan, place)
    with changes.own_errors(), api.exchanging(pipeline.replicas, weight, lambda: weight.in_step):
        callbacks = callbacks_of_fit(
            job,
            feed,
            plan,
            world,
            pipeline.replicas,
            weight,
            StopSignal(),
            reporter,
            trial=trial,
            epoch_end=functools.partial(StagedEpoch, pipeline, weight, batches, world),
            whole=GatheredModel(pipeline, is_looked_at=is_looked_at(job)) if is_whole else None,
            exchange=pipeline,
        )
        StagedTraining(model, pipeline, batches, weight).run(job.first_epoch, config.epochs, callbacks)
    trained = read_variables(model) if is_whole else list(pipeline.weights())
    if world.rank == 0:
        reporter.result([*trained, *map(read, job.outside)], feed.rows)


def needs_whole(job: TrainingJob) -> bool:
    """Returns whether each rank has to have the whole model; the same on all ranks.

    Else each has its own stage alone: nobody looks at the model before the end, and no loss has to be tried out.
    """
    return is_looked_at(job) or may_couple_rows(job.model.build_structure())


def with_weights_on_disk(job: TrainingJob) -> TrainingJob:
    """Returns a job that holds no weights in memory, where ranks do not need the whole model.

    They lie in the folder of this process until it ends.
    """
    if needs_whole(job):
        return job
    folder = Path(tempfile.mkdtemp(prefix="elephant-weights-", dir=scratch_folder()))
    return replace(job, model=job.model.with_weights_on_disk(folder))


def _try_losses_out(model: keras.Model, job: TrainingJob, feed: BatchFeed) -> LossTrial | None:
    """Has the rank with the rows of a replica try model and losses on some of them, while its model is whole.

    Returns:
        What tries the losses on further rows; None where nothing is left to try.
    """
    batch = feed.sample(MOST_ROWS) if may_couple_rows(model) else None
    if batch is None:
        return None
    losses = RankLosses(model, None)
    trial = try_out(losses, model, batch, sample=feed.sample, allowed=job.config.allow_batch_coupled_loss)
    for loss in losses.losses:
        if loss.kind == SUM:
            raise UnsupportedError(
                f"{OPTION}: expected losses that are means over rows, which those of micro-batches add up to. "
                f"Received: {loss.name!r}, which is a sum. Return a value of each row."
            )
    return trial


def _build_metrics(model: keras.Model, feed: BatchFeed) -> None:
    """Has metrics make what they count with, as they do on a replica with rows: those of all are added up."""
    _, labels, weights = keras.utils.unpack_x_y_sample_weight(feed.stand_in())
    outputs = keras.tree.map_structure(
        lambda tensor: np.zeros((current().stand_in_rows, *(size or 1 for size in tensor.shape[1:])), tensor.dtype),
        model.output,
    )
    for compiled in (compiled_loss(model), compiled_metrics(model)):
        if compiled is not None:
            count = getattr(compiled, "update_state", compiled)
            count(labels, outputs, weights)
    model.reset_metrics()
