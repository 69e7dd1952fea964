"""Synchronous training of one rank: Keras' own ``fit``, with the gradients of all ranks averaged at every step."""

from __future__ import annotations

import logging

import keras

from elephant.collective.base import Collective
from elephant.data.epoch_plan import EpochPlan, random_state
from elephant.data.shard import Shard
from elephant.modeling.gradients import GradientAverager
from elephant.modeling.variables import build_variables, random_generators, read_variables
from elephant.training.agreement import share_variables
from elephant.training.callbacks import AgreeToStop, GlobalEpoch, IdleSteps, StepProgress, callbacks_of_rank
from elephant.training.feed import Feed
from elephant.training.job import Reporter, TrainingJob

logger = logging.getLogger(__name__)


def train_rank(job: TrainingJob, shard: Shard, plan: EpochPlan, collective: Collective, reporter: Reporter) -> None:
    """Trains one rank to the end and reports the trained variables from rank 0.

    Args:
        job: What the driver asked for.
        shard: This rank's rows.
        plan: The steps of an epoch.
        collective: Connects the ranks.
        reporter: Where progress and the result go.

    Raises:
        NetworkError: Another rank is gone.
        TrainingError: The ranks do not agree any more.
        Exception: Whatever the model or a callback raises.
    """
    feed = Feed(shard, plan, job.config, collective.rank)
    model = _prepared_model(job, feed, plan, collective)
    averager = GradientAverager(collective, plan)
    if collective.world_size > 1:
        averager.attach(model.optimizer)
    try:
        model.fit(
            feed.training_batches(),
            epochs=job.config.epochs,
            steps_per_epoch=plan.steps,
            callbacks=_callbacks(job, feed, plan, collective, averager, reporter),
            verbose=0,
        )
    except Exception as error:
        if averager.error is not None and averager.error is not error:
            raise averager.error from error
        raise
    if collective.rank == 0:
        reporter.result(read_variables(model), feed.row_shape)


def _prepared_model(job: TrainingJob, feed: Feed, plan: EpochPlan, collective: Collective) -> keras.Model:
    job.model.settings.apply()
    # What layers and model functions draw without a seed of their own, they draw from this one.
    keras.utils.set_random_seed(job.config.seed % 2**32)
    model = job.model.build()
    build_variables(model, feed.row_shape)
    if job.config.learning_rate is not None:
        model.optimizer.learning_rate = job.config.learning_rate
    if collective.world_size > 1:
        share_variables(model, collective)
    if collective.rank > 0:
        # Ranks that started with the same generators would drop the same units in every step.
        for index, generator in enumerate(random_generators(model)):
            generator.assign(random_state(job.config.seed, collective.rank, index).astype(generator.dtype))
    _leave_compiled_loops(model, plan)
    return model


def _leave_compiled_loops(model: keras.Model, plan: EpochPlan) -> None:
    if model.jit_compile and plan.world_size > 1:
        logger.warning("jit_compile is switched off: XLA cannot contain the exchange of gradients between ranks.")
        model.jit_compile = False
    # Several steps at a time need steps that all weigh the same, and that divide the epoch:
    # Keras would draw the missing ones from the next epoch's rows.
    even = len(set(plan.training_rows)) == 1 and plan.steps % model.steps_per_execution == 0
    if model.steps_per_execution > 1 and not even:
        logger.warning("steps_per_execution is set to 1: the epoch's %d steps are not all alike.", plan.steps)
        model.steps_per_execution = 1


def _callbacks(
    job: TrainingJob,
    feed: Feed,
    plan: EpochPlan,
    collective: Collective,
    averager: GradientAverager,
    reporter: Reporter,
) -> list[keras.callbacks.Callback]:
    rank = collective.rank
    callbacks: list[keras.callbacks.Callback] = []
    if plan.own_steps(rank) < plan.steps:
        callbacks.append(IdleSteps(plan.own_steps(rank)))
    own = callbacks_of_rank(job.callbacks, rank)
    callbacks.append(GlobalEpoch(collective, plan, averager, feed.validation_batches, own))
    callbacks.extend(own)
    if rank == 0:
        callbacks.append(StepProgress(reporter, plan.steps))
    callbacks.append(AgreeToStop(collective, averager, reporter, plan.own_steps(rank)))
    return callbacks
