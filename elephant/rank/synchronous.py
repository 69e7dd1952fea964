"""Synchronous training of one rank: every step together with all others, or several steps alone (local SGD).

Each rank takes its steps with its own optimizer, and every k steps, or once an
epoch, all take the average of their weights, weighted by the rows each has used since
the last time (McMahan et al. 2017, algorithm 1; Stich 2019, algorithm 1). Fewer
exchanges make a slow network bearable. What it gives up: N ranks no longer do what one process
does on larger batches; the longer they are apart, the more the average differs from it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.gradient_averager import GradientAverager, StopSignal, give_back
from elephant.backends.gradient_kinds import GradientInfo
from elephant.checkpoint.other_ranks import for_ranks
from elephant.collective import api
from elephant.collective.communicator import Communicator
from elephant.collective.fusion import WORTH_SPLITTING, FusedBuffer, measure_link
from elephant.compression import reduction_for
from elephant.data.epoch_plan import EpochPlan
from elephant.data.shard import Shard
from elephant.data.virtual_shards import ElasticPlan
from elephant.modeling.layers.sync_batch_norm import synchronize, synchronized_layers
from elephant.modeling.variables import (
    BFLOAT16,
    build_metrics,
    metric_variables,
    read_values,
    shared_variables,
)
from elephant.rank.callbacks.callback_rules import callbacks_of_rank, may_stop_in_batches
from elephant.rank.callbacks.checkpoint_moments import CheckpointMoments
from elephant.rank.callbacks.divided_optimizer import (
    DividedOptimizer,
    divided_optimizer,
    read_whole,
    require_divided_callbacks,
)
from elephant.rank.callbacks.divided_tables import FitTables, TableEndpoint, TableUpdates, divided_tables
from elephant.rank.callbacks.end_notice import EndNotice
from elephant.rank.callbacks.rank_callbacks import (
    CallbackOrder,
    CollectiveStop,
    DriverTurn,
    GlobalEpoch,
    IdleSteps,
    StepProgress,
    any_rank,
    in_order,
    require_averaged_weights,
    share_variables,
)
from elephant.rank.callbacks.remote_files import RemoteFiles
from elephant.rank.callbacks.row_moves import RowMoves
from elephant.rank.callbacks.shared_state import OutsideVariables, outside_here, read
from elephant.rank.checkpoints import (
    CheckpointCallback,
    StateWithin,
    by_path,
    require_same_rows,
    require_same_sums,
    restore,
)
from elephant.rank.input.feed import BatchFeed
from elephant.rank.input.preprocessed_shard import prepared_rows
from elephant.rank.job import (
    ExchangeCounts,
    Reporter,
    SummedCounts,
    TrainingJob,
    mixed_policy,
    prepared_model,
    reseed,
    set_up_process,
)
from elephant.rank.keras_fit import FitCallbacks, StepRuns, fit_from
from elephant.rank.metrics.batch_means import count_rows
from elephant.rank.rank_progress import RankWeight, StepCounter, StepTimes
from elephant.rank.traced_step import TracedStep, average_gradients, leave_loops, steps_in_runs
from elephant.rank.trials import rehearsal
from elephant.rank.trials.coupling import KINDS, RankLosses
from elephant.rank.trials.loss_trial import LossTrial, may_couple_rows, try_out
from elephant.rank.trials.loss_watch import LossWatch
from elephant.rank.trials.row_dependence import MOST_ROWS
from elephant.training.warmup import broadcast_rate


class WeightAveraging(keras.callbacks.Callback):
    """Averages the ranks' trainable weights every few steps and at the end of each epoch.

    Momenta and other state of the optimizers stay each rank's own. What travels is how far the weights
    have moved since the last average, so that it can be compressed as gradients can.

    Args:
        every: Steps between two averages; None means an epoch.
        compression: How what crosses hosts is encoded; see `elephant.compression`.
    """

    def __init__(
        self,
        communicator: Communicator,
        weight: RankWeight,
        *,
        every: int | None,
        compression: str | None,
        stop: StopSignal,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._weight = weight
        self._every = every
        self._compression = compression if communicator.crosses_hosts else None
        self._stop = stop
        self._averaged_at = self._step = 0
        self._remembered: Sequence[np.ndarray] = ()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        variables = self.model.trainable_variables
        self._agreed = read_values(variables)
        self._buffer = FusedBuffer([*((value.shape, value.dtype) for value in self._agreed), ((1,), "float64")])
        self._reduction = reduction_for(self._compression, self._buffer.float32_slices)
        give_back(self._reduction.memory, self._remembered)

    @property
    def memory(self) -> list[np.ndarray]:
        """Arrays that compression keeps from one average to the next."""
        return self._reduction.memory

    def remember(self, memory: Sequence[np.ndarray]) -> None:
        """Gives compression back what it kept; before training begins."""
        self._remembered = memory

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._averaged_at = self._step = self._weight.step
        self._before_idling: list[np.ndarray] | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._weight.is_idle and self._before_idling is None:
            # Stand-in rows are trained on from here on; what they do to the weights is not to count.
            self._before_idling = read_values(self.model.trainable_variables)
        elif not self._weight.is_idle and self._before_idling is not None:
            for variable, value in zip(self.model.trainable_variables, self._before_idling, strict=True):
                variable.assign(value)
            self._before_idling = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = batch + 1
        if self._every is not None and self._step % self._every == 0 and self._step < self._weight.plan.steps:
            self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._average()

    def _average(self) -> None:
        """Gives every rank the weights that all have agreed on before, plus the average move since then."""
        variables = self.model.trainable_variables
        learned = self._before_idling or read_values(variables)
        moves = [value - agreed for value, agreed in zip(learned, self._agreed, strict=True)]
        self._buffer.pack([*moves, np.zeros(1)], self._weight.since(self._averaged_at))
        flag = self._buffer.unpack()[-1]
        flag[0] = float(self._stop.requested)
        self._buffer.allreduce(self._communicator, lambda flat: self._reduction.reduce_(flat, self._communicator))
        self._stop.agreed = self._stop.agreed or bool(flag[0] > 0)
        for variable, agreed, move in zip(variables, self._agreed, self._buffer.unpack(), strict=False):
            agreed += move
            variable.assign(agreed)
        self._averaged_at, self._before_idling = self._step, None


def train_rank(
    job: TrainingJob,
    shard: Shard,
    plan: EpochPlan,
    world: Communicator,
    reporter: Reporter,
    traced_step: TracedStep | None = None,
    replicas: Communicator | None = None,
    endpoint: TableEndpoint | None = None,
) -> None:
    """Trains one rank to the end and reports the trained variables from rank 0.

    Args:
        plan: The steps of the replicas.
        world: All ranks: which of them reports, whom callbacks belong to, and who stops with whom.
        endpoint: Where the others reach this rank's parts of tables; None where no model has any.
        replicas: Those with the same weights, which share the rows and average gradients; all ranks where it is None.

    Raises:
        NetworkError: Another rank is gone.
        TrainingError: The ranks do not agree any more.
        Exception: Whatever the model or a callback raises.
    """
    replicas = world if replicas is None else replicas
    overlaps = bool(job.config.bucket_bytes) or (job.config.bucket_bytes is None and replicas.crosses_hosts)
    set_up_process(overlaps=overlaps)
    outside = outside_here(job.outside, job.callbacks, job.model, job.preprocessing.given)
    job = replace(job, outside=outside)
    if job.config.elastic is not None and job.state is not None:
        job = replace(job, state=for_ranks(job.state, replicas.world_size))
    shard, changes = prepared_rows(job, shard, replicas, replicas.rank)
    feed = BatchFeed(shard, plan, job.config, replicas.rank, changes, job.class_weight)
    model = _prepared_model(job, feed, plan, replicas, traced_step)
    require_same_rows(job, feed.digest, replicas)
    batches = feed.training_batches(*job.first)
    build_metrics(model, batches)
    if job.state is not None and job.state.step:
        if len(metric_variables(model)) < len(job.state.group(f"metric/{replicas.rank}")):
            # Those that wait for a first batch: the sums of the epoch's first steps are to be given back before it.
            with contextlib.suppress(Exception):
                model.test_on_batch(*keras.utils.unpack_x_y_sample_weight(feed.stand_in()))
            model.reset_metrics()
        require_same_sums(model, job.state, replicas.rank)
    require_averaged_weights(model, job.callbacks)
    if job.config.shard_optimizer:
        require_divided_callbacks(job.callbacks)
        job = job if job.state is None else replace(job, state=by_path(job.state, model, replicas.rank))
    divided = divided_optimizer(model, replicas, wanted=job.config.shard_optimizer)
    weight, stop, notice = RankWeight(plan, replicas.rank, job.first), StopSignal(), EndNotice()
    with divided_tables(model, replicas, endpoint) as tables:
        with (
            changes.own_errors(),
            api.exchanging(replicas, weight, lambda: weight.in_step and job.config.averages_gradients),
            _averaged_gradients(model, job, feed, replicas, weight, stop, traced_step, divided) as (averager, trial),
            # Where no state is kept, a process that is to end has nothing to wait for.
            notice.heeded() if job.config.keeps_states else contextlib.nullcontext(),
        ):
            if tables.rank_tables is not None:
                # Nothing that a trial of a step makes is a contribution to the tables.
                tables.rank_tables.share = lambda: weight() if weight.in_step else None
            callbacks = callbacks_of_fit(
                job,
                feed,
                plan,
                world,
                replicas,
                weight,
                stop,
                reporter,
                trial=trial,
                averager=averager,
                notice=notice,
                tables=tables,
                divided=divided,
            )
            # What was traced ahead is taken, unless loops that did not fit were left since.
            begins = weight.begin_next if plan.varies else None
            steps = (traced_step and traced_step.steps) or steps_in_runs(model, job, begins)
            moves = next((callback for callback in callbacks if isinstance(callback, RowMoves)), None)

            def pauses() -> bool:
                return moves is not None and moves.is_due

            told = (
                FitCallbacks(callbacks, model, job.config.epochs, plan.steps, first=job.first[1], pauses=pauses)
                if steps is None
                else StepRuns(callbacks, model, job.config.epochs, steps, weight, pauses)
            )
            fit = functools.partial(fit_from, model, callbacks=told, epochs=job.config.epochs, steps=plan.steps)
            has_ended = fit(batches, epoch=job.first_epoch)
            while not has_ended and moves is not None:
                # What reads ahead ends with the last reference.
                del batches
                moves.move()
                batches = feed.training_batches(weight.epoch + 1)
                has_ended = fit(batches, epoch=weight.epoch + 1)
        with tables.written("result"):
            # While the others still serve their parts of tables.
            variables = read_whole(model, divided, world)
            if world.rank == 0:
                reporter.result([*variables, *map(read, job.outside)], feed.rows)


def common_policy(policy: str | None, communicator: Communicator) -> str | None:
    """Returns the policy of mixed precision of all ranks, which compute alike: a rank without a GPU decides."""
    return BFLOAT16 if policy is not None and any_rank(policy == BFLOAT16, communicator) else policy


def _prepared_model(
    job: TrainingJob, feed: BatchFeed, plan: EpochPlan, communicator: Communicator, traced_step: TracedStep | None
) -> keras.Model:
    policy = common_policy(mixed_policy(job.config), communicator)
    if traced_step is None:
        model = prepared_model(job, feed.rows, num_ranks=plan.world_size, policy=policy)
    else:
        model = traced_step.model
    if communicator.world_size > 1:
        share_variables(shared_variables(model), communicator)
        count_rows(model)
    reseed(model, job.config.seed, communicator.rank)
    restore(model, job, communicator)
    leave_loops(model, plan, job.config.frequency)
    return model


def _try_losses_out(
    losses: RankLosses,
    model: keras.Model,
    job: TrainingJob,
    plan: EpochPlan,
    feed: BatchFeed,
    communicator: Communicator,
) -> LossTrial | None:
    """Has every rank try model and losses on its own rows, before any step; what losses are tells that with most rows.

    Returns:
        What tries the losses on further rows; None where nothing is left to try.
    """
    if not may_couple_rows(model):
        return None
    rank, trial = int(np.argmax(plan.training_rows)), None
    batch = feed.sample(MOST_ROWS)
    if batch is not None:
        allowed, is_first = job.config.allow_batch_coupled_loss, communicator.rank == rank
        trial = try_out(losses, model, batch, sample=feed.sample, allowed=allowed, metrics=is_first)
    known = np.array([KINDS.index(loss.kind) for loss in losses.losses], np.int64)
    losses.settle([KINDS[place] for place in communicator.allgather(known)[rank]])
    return trial


def _rehearse_step(
    averager: GradientAverager, model: keras.Model, job: TrainingJob, plan: EpochPlan, feed: BatchFeed
) -> None:
    """Has the rank with most rows find out what a step's gradients are, before any step; see `rehearsal.rehearse`."""
    if not rehearsal.is_needed(model):
        return
    rank, names, known = int(np.argmax(plan.training_rows)), rehearsal.gradient_names(model), GradientInfo()
    batch = feed.sample(MOST_ROWS) if averager.communicator.rank == rank else None
    if batch is not None:
        known = rehearsal.rehearse(model, averager, batch, allowed=job.config.allow_batch_coupled_loss)
    rows = averager.communicator.allgather(known.to_rows(names))[rank]
    known = GradientInfo.from_rows(rows, names)
    averager.sums, averager.places = set(known.sums), dict(known.places)


@contextlib.contextmanager
def _averaged_gradients(
    model: keras.Model,
    job: TrainingJob,
    feed: BatchFeed,
    communicator: Communicator,
    weight: RankWeight,
    stop: StopSignal,
    traced_step: TracedStep | None,
    divided: DividedOptimizer | None,
) -> Iterator[tuple[GradientAverager | None, LossTrial | None]]:
    """Has the model's optimizers average gradients over the ranks, unless these average weights or are one.

    Gives what averages them, and what tries the losses on further rows; None where there is no such thing.

    Args:
        divided: The model's optimizer, where each rank updates a part; None where each updates all.
    """
    config = job.config
    if communicator.world_size == 1 or not config.averages_gradients:
        yield None, None
        return
    if traced_step is not None and traced_step.averager is not None and traced_step.losses is not None:
        averager, losses = traced_step.averager, traced_step.losses
        averager.bind(communicator, weight, stop)
    else:
        averager = _attached_averager(model, job, communicator, weight, stop)
        averager.optimizer_part = None if divided is None else divided.optimizer_part
        losses = RankLosses(model, averager)
    try:
        averager.agree_on_kernel()
        current().reduce_on_devices(averager, config)
        trial = _try_losses_out(losses, model, job, weight.plan, feed, communicator)
        _rehearse_step(averager, model, job, weight.plan, feed)
        synchronize(synchronized_layers(model, config.sync_batch_norm), communicator, weight)
        yield averager, trial
    except Exception as error:
        # Ends an exchange that still goes on in the background.
        communicator.abort()
        if averager.error is not None and averager.error is not error:
            raise averager.error from error
        raise
    finally:
        averager.close()


def _attached_averager(
    model: keras.Model, job: TrainingJob, communicator: Communicator, weight: RankWeight, stop: StopSignal
) -> GradientAverager:
    config = job.config
    num_bytes = sum(4 * math.prod(variable.shape) for variable in model.trainable_variables)
    chosen = config.bucket_bytes is not None or num_bytes < WORTH_SPLITTING or not communicator.crosses_hosts
    link = None if chosen else measure_link(communicator)
    averager = GradientAverager(
        communicator, weight, compression=config.compression, bucket_bytes=config.bucket_bytes, link=link, stop=stop
    )
    average_gradients(model, averager)
    return averager


def callbacks_of_fit(
    job: TrainingJob,
    feed: BatchFeed,
    plan: EpochPlan,
    world: Communicator,
    replicas: Communicator,
    weight: RankWeight,
    stop: StopSignal,
    reporter: Reporter,
    *,
    trial: LossTrial | None = None,
    averager: GradientAverager | None = None,
    notice: EndNotice | None = None,
    epoch_end: Callable[[list[keras.callbacks.Callback]], keras.callbacks.Callback] | None = None,
    whole: keras.callbacks.Callback | None = None,
    exchange: ExchangeCounts | None = None,
    tables: FitTables | None = None,
    divided: DividedOptimizer | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of a rank, elephant's and the user's, in their order.

    Args:
        plan: How many rows each rank has.
        weight: Of the replica, in the steps that it takes.
        trial: Tries the losses on further rows; None where there is nothing to try.
        averager: Averages gradients; None where that is not within the optimizer, or nobody does.
        notice: That this process is to end; None where there is no state within an epoch, which no rank has as a whole.
        epoch_end: Makes what ends an epoch, of the callbacks that hear of its validation, where no rank trains on
            rows that stand in for others; None is for ranks with a whole model each.
        whole: Has a divided model in one piece for all callbacks behind it; None where a model is not divided.
        exchange: Counts what goes to other ranks; None where all of it goes through the world.
        tables: The model's; None where it has none.
        divided: The optimizer, of whose state ranks have parts; None where each has all.
    """
    rank, config, order = world.rank, job.config, CallbackOrder
    local = not config.averages_gradients and replicas.world_size > 1
    own = callbacks_of_rank(job.callbacks, rank)
    broadcast_rate(own, config.batches_of(plan.world_size))
    rank_tables = None if tables is None else tables.rank_tables
    if exchange is None:
        exchange = world if rank_tables is None else SummedCounts([world, rank_tables])
    times = StepTimes(reporter, rank, plan.world_size, feed, exchange) if job.traced else None
    evaluated = own if times is None else [*own, times]
    # Ranks that train alone do not meet after each step.
    asks, told = not local and may_stop_in_batches(job.callbacks), reporter if job.driver_reads is None else None
    progress = StepProgress(reporter, rank, feed, exchange)
    callbacks: dict[CallbackOrder, list[keras.callbacks.Callback]] = {
        order.STEPS: [StepCounter(weight), *([] if rank_tables is None else [TableUpdates(rank_tables)])],
        order.EPOCH: [
            GlobalEpoch(replicas, weight, feed.validation_batches, evaluated)
            if epoch_end is None
            else epoch_end(evaluated)
        ],
        order.OF_USER: own,
        order.PROGRESS: [progress],
        order.STOP: [CollectiveStop(world, stop, told, weight, asks=asks)],
    }
    moves_rows = isinstance(weight.plan, ElasticPlan) and replicas.world_size > 1
    # Rows that move may leave steps without any.
    if epoch_end is None and (moves_rows or weight.plan.own_steps(weight.rank) < weight.plan.pass_steps):
        callbacks[order.IDLE] = [IdleSteps(weight, keep_optimizers=local, synchronized=config.sync_batch_norm)]
    if local:
        every = config.frequency if isinstance(config.frequency, int) else None
        averaging = WeightAveraging(replicas, weight, every=every, compression=config.compression, stop=stop)
        callbacks[order.EXCHANGE] = [averaging]
    if job.outside and world.world_size > 1:
        callbacks[order.OUTSIDE] = [OutsideVariables(job.outside, world, own)]
    if whole is not None:
        callbacks[order.WHOLE] = [whole]
    remote = RemoteFiles(own)
    if remote.is_needed:
        callbacks[order.FILES] = [remote]
    if job.driver_reads is not None:
        wait_s = config.timeouts.collective_s / 2
        reading = contextlib.nullcontext if tables is None else tables.left_out
        turn = DriverTurn(
            world,
            reporter,
            told=job.driver_reads,
            steps=plan.steps,
            feed=feed,
            wait_s=wait_s,
            divided=divided,
            reading=reading,
        )
        callbacks[order.DRIVER] = [turn]
    if config.keeps_states or job.state is not None:
        within = None
        if notice is not None:
            within = _state_within(job, feed, replicas, weight, callbacks, averager, notice)
        keeping = CheckpointCallback(
            job, world, reporter, own=own, rows=feed.rows, within=within, tables=tables, divided=divided
        )
        callbacks[order.CHECKPOINT] = [keeping]
    if moves_rows and isinstance(weight.plan, ElasticPlan):
        moves = RowMoves(replicas, weight, weight.plan, feed, progress, reporter, epochs=config.epochs)
        callbacks[order.MOVES] = [moves]
    if trial is not None:
        callbacks[order.LOSSES] = [LossWatch(trial, allowed=config.allow_batch_coupled_loss)]
    return in_order(callbacks, times)


def _state_within(
    job: TrainingJob,
    feed: BatchFeed,
    communicator: Communicator,
    weight: RankWeight,
    callbacks: Mapping[CallbackOrder, Sequence[keras.callbacks.Callback]],
    averager: GradientAverager | None,
    notice: EndNotice,
) -> StateWithin:
    """Returns the parts of a state that are a rank's own within an epoch."""
    config, every = job.config, 1
    averaging = next(
        (one for one in callbacks.get(CallbackOrder.EXCHANGE, ()) if isinstance(one, WeightAveraging)), None
    )
    if averaging is not None:
        every = config.frequency if isinstance(config.frequency, int) else weight.plan.steps
    idle = next((one for one in callbacks.get(CallbackOrder.IDLE, ()) if isinstance(one, IdleSteps)), None)
    compressing = averaging or averager if config.compression is not None and communicator.crosses_hosts else None
    moments = CheckpointMoments(
        config.checkpoint_seconds, communicator, weight, every=every, in_memory=config.forms_generations
    )
    return StateWithin(moments=moments, idle=idle, notice=notice, compressing=compressing, rows=feed.digest)
