"""Training step, made before the data is there.

What a step computes is known before the ranks have met: the options, the model and the types of the
columns decide it. What is not, such as the other ranks and their shares, or the servers, is given to it when they have.
Where a fit's step depends on more, nothing is done ahead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import keras

from elephant.backends import current
from elephant.backends.base import Arrays, Steps
from elephant.backends.gradient_averager import GradientAverager
from elephant.collective.communicator import LocalCommunicator
from elephant.collective.fusion import WORTH_SPLITTING
from elephant.config import FitConfig
from elephant.data.epoch_plan import EpochPlan
from elephant.data.schema import SCALAR, DataSchema
from elephant.data.shard import Shard
from elephant.errors import TrainingError
from elephant.modeling.model_info import has_own_step
from elephant.modeling.push_hook import PushHook, attach_exchange
from elephant.modeling.variables import build_metrics, optimizers_of
from elephant.rank.callbacks.callback_rules import STEP_EVENTS, listens
from elephant.rank.input.tensors import Tensors
from elephant.rank.job import TrainingJob, prepared_model
from elephant.rank.metrics.batch_means import count_shares
from elephant.rank.process_pipe import SPARE
from elephant.rank.trials.coupling import RankLosses

logger = logging.getLogger(__name__)


def leave_loops(model: keras.Model, plan: EpochPlan, frequency: str | int) -> None:
    """Has a model take one step at a time, with one line in the log, where several would break the exchange.

    Args:
        frequency: How often the ranks exchange; see `elephant.config.FitConfig`.
    """
    # Several steps at a time need steps that all weigh the same, and that divide the epoch (Keras would
    # draw the missing ones from the next epoch's rows) and the time between two averages of weights.
    length = model.steps_per_execution
    fits = len(set(plan.training_rows)) == 1 and plan.steps % length == 0 and not plan.varies
    if isinstance(frequency, int):
        fits = fits and frequency % length == 0
    if length > 1 and not fits:
        logger.warning("steps_per_execution is set to 1: the epoch's %d steps are not all alike.", plan.steps)
        model.steps_per_execution = 1


def leave_loops_of_server(model: keras.Model, config: FitConfig) -> None:
    """Switches off, with one line in the log, what would break the exchange with parameter servers."""
    if config.pushes_gradients and (compiler := current().leave_compiled_step(model)):
        logger.warning(
            "jit_compile is switched off: %s cannot contain the exchange with the parameter server.", compiler
        )
    if model.steps_per_execution > 1:
        logger.warning("steps_per_execution is set to 1: every step is numbered for the parameter server.")
        model.steps_per_execution = 1


def steps_in_runs(model: keras.Model, job: TrainingJob, begins: Callable[[], None] | None = None) -> Steps | None:
    """Returns a function that takes several steps of a model; None where each is to be taken by itself.

    The ranks decide alike, so that they meet in the same steps where one wants to stop.

    Args:
        begins: Called before each step of a run; None where all of them weigh the same.
    """
    config = job.config
    alone = config.num_ranks == 1 or config.averages_gradients
    looked_at = any(listens(callback, *STEP_EVENTS) for callback in job.callbacks)
    if not config.is_synchronous or not alone or job.traced or looked_at:
        return None
    return current().steps_function(model, begins)


def average_gradients(model: keras.Model, averager: GradientAverager) -> None:
    """Makes a model's optimizers average gradients over the ranks, and its metrics count parts of batches."""
    count_shares(model, averager)
    optimizers = optimizers_of(model)
    ends_step = len(optimizers) == 1 and not has_own_step(model)
    if not ends_step and (compiler := current().leave_compiled_step(model)):
        logger.warning("jit_compile is switched off: %s cannot contain the exchange in a step of one's own.", compiler)
    for optimizer in optimizers:
        current().average_gradients(averager, optimizer, model if ends_step else None)


@dataclass(frozen=True)
class TracedStep:
    """A model that is built, and whose training step is traced where that could be done.

    Args:
        model: The model.
        averager: Averages the gradients of its step, once it is bound to the ranks; None where nothing is averaged.
        losses: The model's losses, where gradients are averaged, by ranks or by servers.
        hook: Pushes the gradients of its step to the servers that it is told; None where nothing is pushed.
        steps: Takes several steps; None where each is taken by itself.
    """

    model: keras.Model
    averager: GradientAverager | None
    losses: RankLosses | None
    hook: PushHook | None
    steps: Steps | None


def traced_step(job: TrainingJob) -> TracedStep | None:
    """Builds a fit's model and traces its step; returns None where more has to be known before.

    An error of the user's model is not raised: the fit meets it again, where it has its ranks and its steps.
    """
    if not _is_known(job):
        return None
    try:
        shard = Shard(None, job.schema, {})
        rows = job.schema.row_spec(shard.row_shapes)
        model = prepared_model(job, rows, num_ranks=job.config.num_ranks)
        averager = losses = hook = None
        if not job.config.is_synchronous:
            leave_loops_of_server(model, job.config)
            hook = attach_exchange(None, model) if job.config.pushes_gradients else None
            losses = RankLosses(model, None) if job.config.trains_in_rounds and job.config.num_ranks > 1 else None
        elif job.config.num_ranks > 1 and job.config.averages_gradients:
            averager = GradientAverager(LocalCommunicator(), lambda: 0.0, bucket_bytes=job.config.bucket_bytes)
            average_gradients(model, averager)
            losses = RankLosses(model, averager)
        steps = steps_in_runs(model, job)
        # One that waits for a loss takes that for whole batches as well, which is traced when a fit is long.
        whole = job.config.rank_batch_size if SPARE in os.environ else None
        _trace(model, steps, Tensors(shard, job.class_weight), whole)
    except Exception as error:
        logger.info("the step was not traced ahead: %s: %s", type(error).__name__, error)
        return None
    return TracedStep(model, averager, losses, hook, steps)


def _is_known(job: TrainingJob) -> bool:
    """Returns whether job and columns alone decide the step."""
    config, spec = job.config, job.model
    if not current().traces_ahead or config.pipeline_stages is not None:
        return False
    if job.state is not None and not config.is_synchronous:
        return False
    if config.shard_optimizer:
        # Each rank updates variables of its own.
        return False
    if config.elastic is not None:
        # Its steps tell that they begin to what is there when the ranks have met.
        return False
    if job.preprocessing.preprocess is not None or job.preprocessing.augment is not None:
        return False
    synchronizes = config.sync_batch_norm or spec.info.synchronized
    if config.mixed_precision or synchronizes or config.compression is not None:
        return False
    if config.scale_learning_rate and not config.is_synchronous:
        return False
    # The way of a larger model's gradients depends on the hosts.
    is_small = spec.archive is not None and len(spec.archive) < WORTH_SPLITTING
    return is_small and not config.bucket_bytes and _shapes_are_known(job.schema)


def _shapes_are_known(schema: DataSchema) -> bool:
    return all(field.is_fixed and (field.kind == SCALAR or field.width is not None) for field in schema.batch_fields)


def _trace(model: keras.Model, steps: Steps | None, tensors: Tensors, rows: int | None) -> None:
    """Traces the training step for batches as the fit will have them. None is computed, and no variable changes."""

    def read(_: int) -> Arrays:
        raise TrainingError("expected no batch to be asked for while a step is traced")

    batches = current().batches(read, 0, tensors, in_runs=False)
    build_metrics(model, batches)
    current().trace(model, steps, batches, rows)
