"""Synchronous training of one rank: Keras' own ``fit``, with what the ranks learn averaged as it goes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import keras
import numpy as np

from elephant.collective.communicator import Collective
from elephant.collective.fusion import WORTH_SPLITTING, measure_link
from elephant.data.epoch_plan import EpochPlan
from elephant.data.shard import Shard
from elephant.modeling.allreduce_hook import attach
from elephant.modeling.gradient_averager import GradientAverager, StopSignal
from elephant.modeling.sync_batch_norm import synchronise
from elephant.modeling.variables import BFLOAT16, build_metrics, optimizers_of, read_variables
from elephant.training.agreement import any_rank, share_variables
from elephant.training.callbacks import AgreeToStop, GlobalEpoch, IdleSteps, StepProgress, callbacks_of_rank
from elephant.training.checkpoints import KeepState, restore
from elephant.training.coupling import KINDS, MOST_ROWS, RankLosses, may_couple_rows
from elephant.training.feed import Feed
from elephant.training.job import Reporter, TrainingJob
from elephant.training.local_steps import WeightAveraging
from elephant.training.loops import leave_compiled_loops, leave_room_for_buckets
from elephant.training.mounted_files import MountedFiles
from elephant.training.preparation import mixed_policy, prepared_model, reseed
from elephant.training.prepared_rows import prepared_rows
from elephant.training.shares import ShareSteps, StepShare
from elephant.training.traced_step import TracedStep
from elephant.training.warmup import tell_workers


def train_rank(
    job: TrainingJob,
    shard: Shard,
    plan: EpochPlan,
    collective: Collective,
    reporter: Reporter,
    ahead: TracedStep | None = None,
) -> None:
    """Trains one rank to the end and reports the trained variables from rank 0.

    Args:
        job: What the driver asked for.
        shard: This rank's rows.
        plan: The steps of an epoch.
        collective: Connects the ranks.
        reporter: Where progress and the result go.
        ahead: What was made of the job before the ranks had met, if anything.

    Raises:
        NetworkError: Another rank is gone.
        TrainingError: The ranks do not agree any more.
        Exception: Whatever the model or a callback raises.
    """
    if job.config.bucket_bytes or (job.config.bucket_bytes is None and collective.crosses_hosts):
        leave_room_for_buckets()
    shard, changes = prepared_rows(job, shard, collective, collective.rank)
    feed = Feed(shard, plan, job.config, collective.rank, changes)
    model = _prepared_model(job, feed, plan, collective, ahead)
    batches = feed.training_batches(first_epoch=job.first_epoch)
    build_metrics(model, batches)
    share, stop = StepShare(plan, collective.rank), StopSignal()
    with changes.own_errors(), _averaged_gradients(model, job, feed, collective, share, stop, ahead):
        model.fit(
            batches,
            initial_epoch=job.first_epoch,
            epochs=job.config.epochs,
            steps_per_epoch=plan.steps,
            callbacks=_callbacks(job, feed, plan, collective, share, stop, reporter),
            class_weight=None if job.class_weight is None else dict(job.class_weight),
            shuffle=False,  # the feed has done it
            verbose=0,
        )
    if collective.rank == 0:
        reporter.result(read_variables(model), feed.rows)


def _prepared_model(
    job: TrainingJob, feed: Feed, plan: EpochPlan, collective: Collective, ahead: TracedStep | None
) -> keras.Model:
    policy = mixed_policy(job.config)
    if policy is not None and any_rank(policy == BFLOAT16, collective):
        # All compute alike: a rank without a GPU decides.
        policy = BFLOAT16
    if ahead is None:
        model = prepared_model(job, feed.rows, num_workers=plan.world_size, policy=policy)
    else:
        model = ahead.model
    if collective.world_size > 1:
        share_variables(model, collective)
    reseed(model, job.config.seed, collective.rank)
    restore(model, job, collective)
    leave_compiled_loops(model, plan, job.config.frequency)
    return model


def _try_losses_out(
    losses: RankLosses, model: keras.Model, job: TrainingJob, plan: EpochPlan, feed: Feed, collective: Collective
) -> None:
    """Has the rank with most rows find out what the losses are, before any step; see `RankLosses.try_out`."""
    if not may_couple_rows(model):
        return
    rank = int(np.argmax(plan.training_rows))
    if collective.rank == rank:
        losses.try_out(model, feed.first_rows(MOST_ROWS), allowed=job.config.allow_batch_coupled_loss)
    known = np.array([KINDS.index(loss.kind) for loss in losses.losses], np.int64)
    losses.settle([KINDS[place] for place in collective.allgather(known)[rank]])


@contextlib.contextmanager
def _averaged_gradients(
    model: keras.Model,
    job: TrainingJob,
    feed: Feed,
    collective: Collective,
    share: StepShare,
    stop: StopSignal,
    ahead: TracedStep | None,
) -> Iterator[None]:
    """Has the model's optimizers average gradients over the ranks, unless these average weights or are one."""
    config = job.config
    if collective.world_size == 1 or not config.averages_gradients:
        yield
        return
    if ahead is not None and ahead.averager is not None and ahead.losses is not None:
        averager, losses = ahead.averager, ahead.losses
        averager.bind(collective, share, stop)
    else:
        averager = _attached_averager(model, job, collective, share, stop)
        losses = RankLosses(model, averager)
    try:
        _try_losses_out(losses, model, job, share.plan, feed, collective)
        if config.sync_batch_norm:
            synchronise(model, collective, share)
        yield
    except Exception as error:
        # Ends an exchange that still goes on in the background.
        collective.abort()
        if averager.error is not None and averager.error is not error:
            raise averager.error from error
        raise
    finally:
        averager.close()


def _attached_averager(
    model: keras.Model, job: TrainingJob, collective: Collective, share: StepShare, stop: StopSignal
) -> GradientAverager:
    config = job.config
    num_bytes = sum(4 * math.prod(variable.shape) for variable in model.trainable_variables)
    chosen = config.bucket_bytes is not None or num_bytes < WORTH_SPLITTING or not collective.crosses_hosts
    link = None if chosen else measure_link(collective)
    averager = GradientAverager(
        collective, share, compression=config.compression, bucket_bytes=config.bucket_bytes, link=link, stop=stop
    )
    for optimizer in optimizers_of(model):
        attach(averager, optimizer)
    return averager


def _callbacks(
    job: TrainingJob,
    feed: Feed,
    plan: EpochPlan,
    collective: Collective,
    share: StepShare,
    stop: StopSignal,
    reporter: Reporter,
) -> list[keras.callbacks.Callback]:
    rank, config = collective.rank, job.config
    local = not config.averages_gradients and collective.world_size > 1
    callbacks: list[keras.callbacks.Callback] = [ShareSteps(share)]
    if plan.own_steps(rank) < plan.pass_steps:
        callbacks.append(IdleSteps(share, keep_optimizers=local, synchronised=config.sync_batch_norm))
    if local:
        every = config.frequency if isinstance(config.frequency, int) else None
        callbacks.append(WeightAveraging(collective, share, every=every, compression=config.compression, stop=stop))
    own = callbacks_of_rank(job.callbacks, rank)
    tell_workers(own, collective.world_size // config.gpus_per_worker)
    callbacks.append(GlobalEpoch(collective, plan, share, feed.validation_batches, own))
    callbacks.extend(own)
    mounted = MountedFiles(own)
    if mounted.is_needed:
        callbacks.append(mounted)
    if rank == 0:
        callbacks.append(StepProgress(reporter, plan.steps))
    callbacks.append(AgreeToStop(collective, stop, reporter, share))
    if config.checkpoint_path is not None or job.state is not None:
        callbacks.append(KeepState(job, collective, reporter, own=own, rows=feed.rows))
    return callbacks
