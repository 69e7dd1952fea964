"""Asynchronous training of one worker: Keras' own ``fit`` at its own pace, against parameter servers.

A worker that is run again asks the servers how far its partition has got and goes
on from there; so does one whose server was started again from a snapshot. The order
of batches follows from the fit's seed, so that no row is left out and none counts twice.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from elephant.backends import current
from elephant.backends.keras_private import has_schedule
from elephant.collective.communicator import LocalCommunicator
from elephant.data.epoch_plan import EpochPlan
from elephant.data.shard import Shard
from elephant.errors import PositionLost
from elephant.modeling.model_info import has_own_step
from elephant.modeling.optimizer_translation import inner_optimizer
from elephant.modeling.push_hook import PushHook, check_gradient_push
from elephant.modeling.variables import build_metrics, layout_of
from elephant.monitor.events import EpochPart
from elephant.parameter_server.protocol import check_encoding
from elephant.rank.asynchronous.async_callbacks import BatchEvents, WorkerEpochs, WorkerReporter, WorkerSteps
from elephant.rank.asynchronous.gossip_exchange import GossipExchange, GossipMember
from elephant.rank.asynchronous.push_strategies import (
    StepExchange,
    WindowExchange,
    WorkerExchange,
    check_local_optimizers,
)
from elephant.rank.asynchronous.round_checks import check_rounds, try_losses_out
from elephant.rank.asynchronous.worker_tables import tables_of_servers
from elephant.rank.callbacks.rank_callbacks import CallbackOrder, StepProgress, in_order
from elephant.rank.input.feed import BatchFeed
from elephant.rank.input.preprocessed_shard import prepared_rows
from elephant.rank.job import TrainingJob, epoch_plan, mixed_policy, prepared_model, reseed, set_up_process
from elephant.rank.keras_fit import FitCallbacks, fit_from
from elephant.rank.metrics.batch_means import count_rows
from elephant.rank.rank_info import RankInfo
from elephant.rank.rank_progress import StepTimes, TrainingPosition
from elephant.rank.traced_step import TracedStep, leave_loops_of_server
from elephant.rank.trials.coupling import RankLosses
from elephant.rank.trials.loss_watch import LossWatch

if TYPE_CHECKING:
    from elephant.config import FitConfig
    from elephant.parameter_server.client import ParameterServerClient

logger = logging.getLogger(__name__)


def check_model(model: keras.Model, config: FitConfig) -> None:
    """Raises UnsupportedError for a model, or options, that a parameter server cannot train."""
    check_encoding(config.compression)
    config.check_background_exchange()
    layout_of(model)
    if config.pushes_gradients:
        check_gradient_push(model)
    else:
        check_local_optimizers(model, config)
    if config.trains_in_rounds:
        check_rounds(model, config)


def train_worker(
    job: TrainingJob,
    shard: Shard,
    rank_info: RankInfo,
    servers: ParameterServerClient | GossipMember,
    reporter: WorkerReporter,
    traced_step: TracedStep | None = None,
) -> None:
    """Trains one worker from where its partition stands to the end of the fit.

    Where workers gossip, its place among its peers stands for the servers.

    A worker without training rows reports empty epochs, and that is all. When this returns, the servers
    have been left: they had made sure of what was pushed.

    Raises:
        SupersededError: A later attempt trains this partition.
        NetworkError: The servers are gone.
        TrainingError: The servers have given the fit up.
        Exception: Whatever the model or a callback raises.
    """
    # It meets nobody: other workers bring no rows to its steps.
    plan = epoch_plan(job, rank_info.num_rows, rank_info.num_marked)
    if not plan.training_rows[rank_info.rank]:
        if rank_info.num_rows[rank_info.rank]:
            logger.warning("partition %d has rows for validation only: they are left out.", rank_info.rank)
        for epoch in range(job.first_epoch, job.config.epochs):
            reporter.epoch_part(
                EpochPart(rank=rank_info.rank, epoch=epoch, rows=0, val_rows=0, steps=0, wait_s=0.0, logs={})
            )
        servers.close(finished=True)
        return
    with contextlib.closing(_Worker(job, shard, plan, rank_info, servers, reporter, traced_step)) as worker:
        worker.train()


class _Worker:
    """One worker's model, what it exchanges, and its place."""

    def __init__(
        self,
        job: TrainingJob,
        shard: Shard,
        plan: EpochPlan,
        rank_info: RankInfo,
        servers: ParameterServerClient | GossipMember,
        reporter: WorkerReporter,
        traced_step: TracedStep | None,
    ) -> None:
        partition, self._config, self._plan = rank_info.rank, job.config, plan
        set_up_process()
        self._servers = servers
        shard, self._changes = prepared_rows(job, shard, LocalCommunicator(), partition)
        self._feed = BatchFeed(shard, plan, job.config, partition, self._changes, job.class_weight)
        self._position = TrainingPosition(steps=plan.steps)
        self._begin = job.first_epoch * plan.steps
        if traced_step is None:
            self._model = prepared_model(
                job, self._feed.rows, num_ranks=rank_info.world_size, policy=mixed_policy(job.config)
            )
        else:
            self._model = traced_step.model
        reseed(self._model, job.config.seed, partition)
        self._iterations = int(keras.ops.convert_to_numpy(self._model.optimizer.iterations))
        check_model(self._model, job.config)
        leave_loops_of_server(self._model, job.config)
        count_rows(self._model)
        # A step that meets a restarted server raises, and is taken again.
        current().keep_state(self._model)
        hook = None if traced_step is None else traced_step.hook
        self._closing = contextlib.ExitStack()
        self._exchange = self._exchange_for(servers, rank_info, reporter, hook)
        own = list(job.callbacks)
        progress = StepProgress(reporter, partition, self._feed, self._exchange)
        times = None
        if job.traced:
            times = StepTimes(reporter, partition, rank_info.world_size, self._feed, self._exchange, self._position)
        evaluated = own if times is None else [*own, times]
        self._epochs = WorkerEpochs(
            partition,
            plan,
            self._feed,
            self._exchange,
            None if isinstance(servers, GossipMember) else servers,
            self._position,
            reporter,
            callbacks=evaluated,
            in_rounds=job.config.trains_in_rounds,
        )
        trial = None
        if job.config.trains_in_rounds and plan.world_size > 1:
            losses = None if traced_step is None else traced_step.losses
            trial = try_losses_out(losses or RankLosses(self._model, None), self._model, self._feed, job.config)
        epochs, exchange = job.config.epochs, self._exchange
        events = BatchEvents(own, progress, self._position, epochs=epochs, exchange=exchange, reporter=reporter)
        callbacks: dict[CallbackOrder, Sequence[Any]] = {
            CallbackOrder.STEPS: [WorkerSteps(self._position)],
            CallbackOrder.EXCHANGE: [exchange],
            CallbackOrder.EPOCH: [self._epochs],
            CallbackOrder.OF_USER: [events],
        }
        if trial is not None:
            callbacks[CallbackOrder.LOSSES] = [LossWatch(trial, allowed=job.config.allow_batch_coupled_loss)]
        self._callbacks = in_order(callbacks, times)
        for callback in (self._exchange, self._epochs):
            callback.set_model(self._model)

    def _exchange_for(
        self,
        servers: ParameterServerClient | GossipMember,
        rank_info: RankInfo,
        reporter: WorkerReporter,
        hook: PushHook | None,
    ) -> WorkerExchange:
        config, layout = self._config, rank_info.weights_layout
        if isinstance(servers, GossipMember):
            return GossipExchange(servers, layout, config, self._position, reporter, rank_info.rank)
        if config.pushes_gradients:
            return StepExchange(
                self._model,
                servers,
                layout,
                self._position,
                background=config.asynchronous.background_exchange,
                num_servers=len(rank_info.servers),
                rows_at=functools.partial(self._plan.rows_at, rank_info.rank),
                hook=hook,
                tables=self._closing.enter_context(tables_of_servers(self._model, servers, len(rank_info.servers))),
            )
        return WindowExchange(servers, layout, config, self._position)

    def train(self) -> None:
        step = self._servers.position
        while True:
            try:
                with self._changes.own_errors():
                    self._train_from(self._first_step(step))
                self._exchange.finish()
                # A fit that is stopped needs no more of this partition, and its servers may be gone.
                self._servers.close(finished=not self._exchange.stop)
                return
            except Exception as error:
                cause = self._exchange.error or error
                if not isinstance(cause, PositionLost):
                    if cause is error:
                        raise
                    raise cause from error
                step = cause.step

    def _first_step(self, applied: int) -> int:
        """Returns how many batches not to train on again.

        A train_step of the model's own may push several times for a batch, and may have been
        interrupted between two of them: the last batch is taken again, and servers leave out what they have.
        """
        repeats = self._config.pushes_gradients and has_own_step(self._model)
        # Servers of a fit that goes on know nothing of other workers than it had before.
        return max(applied - 1 if repeats else applied, self._begin)

    def _train_from(self, step: int) -> None:
        self._exchange.begin()
        self._epochs.average_state(0.0)
        if self._exchange.stop:
            return
        epoch, first = divmod(step, self._position.steps)
        self._continue_schedule(step)
        if step > self._begin and not first:
            self._epochs.repeat(epoch - 1)
        if epoch < self._config.epochs and not self._exchange.stop:
            self._position.begin(epoch, first=first)
            batches = self._feed.training_batches(first_epoch=epoch, first_step=first)
            build_metrics(self._model, batches)
            told = FitCallbacks(self._callbacks, self._model, self._config.epochs, self._position.steps, first=first)
            fit_from(self._model, batches, told, epoch, epochs=self._config.epochs, steps=self._position.steps)

    def _continue_schedule(self, step: int) -> None:
        """Lets a learning rate that follows a schedule go on where it was; a constant one needs no count of steps."""
        optimizer = inner_optimizer(self._model.optimizer)
        if has_schedule(optimizer):
            optimizer.iterations.assign(self._iterations + step)

    def close(self) -> None:
        self._exchange.close()
        self._closing.close()
