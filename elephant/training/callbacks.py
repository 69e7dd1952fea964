"""The callbacks that make ``model.fit`` on every rank one fit, around those of the user.

Order in the list: `ShareSteps`, `IdleSteps` and `GlobalEpoch` first, so that the user's
callbacks see the numbers of all workers; then the user's; `AgreeToStop` last,
so that all ranks stop at the same step when one of them wants to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Collective
from elephant.data.epoch_plan import EpochPlan
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.gradient_averager import StopSignal
from elephant.modeling.sync_batch_norm import normalisation_statistics
from elephant.modeling.variables import metric_variables, moving_statistics, optimizer_slots
from elephant.training.agreement import (
    any_rank,
    average_moving_statistics,
    global_logs,
    require_equal_weights,
    sum_metrics,
)
from elephant.training.job import Reporter, StepReporter, as_numbers
from elephant.training.shares import StepShare

_PROGRESS_INTERVAL_S = 0.25
# They write files: one rank's, or the driver's, are enough.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    # Not in every Keras 3.
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises ConfigurationError for what is no callback, UnsupportedError for what cannot run on several ranks."""
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigurationError(
                f"callbacks: expected instances of keras.callbacks.Callback. Received: {callback!r}."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UnsupportedError(
                "callbacks: BackupAndRestore would resume one rank at another epoch than the rest. Leave it out, and "
                "pass checkpointPath, where the fit leaves checkpoints, and resume=True to go on from the last one."
            )


def packages_of(callbacks: Sequence[keras.callbacks.Callback]) -> tuple[str, ...]:
    """Returns the packages that callbacks need where they run, besides Keras and what it computes with."""
    has_board = any(isinstance(callback, keras.callbacks.TensorBoard) for callback in callbacks)
    return ("tensorboard",) if has_board else ()


def listens(callback: keras.callbacks.Callback, *events: str) -> bool:
    """Returns whether a callback does anything at one of the events.

    Args:
        callback: Of a class that has a method for it, or an object that was given one, as `LambdaCallback` is.
        events: Names such as ``"on_epoch_end"``.

    >>> listens(keras.callbacks.LambdaCallback(on_epoch_end=print), "on_epoch_begin", "on_epoch_end")
    True
    """
    methods = ((getattr(callback, event), getattr(keras.callbacks.Callback, event)) for event in events)
    return any(getattr(method, "__func__", method) is not nothing for method, nothing in methods)


def callbacks_of_rank(callbacks: Sequence[keras.callbacks.Callback], rank: int) -> list[keras.callbacks.Callback]:
    """Returns those of the user's callbacks that run on a rank: the ones that write files run on rank 0 alone."""
    return [callback for callback in callbacks if rank == 0 or not isinstance(callback, WRITERS)]


class IdleSteps(keras.callbacks.Callback):
    """Undoes what the stand-in rows of a rank that has run out do to its metrics and moving statistics.

    The stand-in's gradient has the weight zero. Its forward pass still counts in the
    metrics and moves batch normalisation's averages: both are kept before the first of several
    idle steps and put back after the last. A rank that trains alone between
    two averages would also apply the stand-in's gradient: its optimizer's state is kept too.

    Args:
        share: Tells whether this rank brings rows to the step that begins.
        keep_optimizers: Whether to keep what optimizers hold besides their count of steps.
        synchronised: Whether batch normalisation sees the rows of all ranks, so that the
            averages of this one go on while it idles.
    """

    def __init__(self, share: StepShare, *, keep_optimizers: bool = False, synchronised: bool = False) -> None:
        super().__init__()
        self._share = share
        self._keep_optimizers = keep_optimizers
        self._synchronised = synchronised
        self._kept: list[tuple[keras.Variable, np.ndarray]] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._kept = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._share.is_idle:
            self._put_back()
        elif self._kept is None:
            shared = {id(v) for v in normalisation_statistics(self.model)} if self._synchronised else set()
            variables = [*metric_variables(self.model), *moving_statistics(self.model)]
            variables = [variable for variable in variables if id(variable) not in shared]
            if self._keep_optimizers:
                variables += optimizer_slots(self.model)
            self._kept = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in variables]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._put_back()

    def _put_back(self) -> None:
        if self._kept is not None:
            # Metrics that were first built in an idle step were not kept: they had counted nothing.
            self.model.reset_metrics()
            for variable, value in self._kept:
                variable.assign(value)
            self._kept = None


class GlobalEpoch(keras.callbacks.Callback):
    """Makes the end of an epoch one for all ranks: metrics, moving statistics, validation.

    Args:
        collective: Connects the ranks.
        plan: The steps of an epoch.
        share: This rank's part of the rows.
        validation_batches: Gives this rank's validation batches.
        callbacks: The user's callbacks on this rank, which see validation begin and end.
    """

    def __init__(
        self,
        collective: Collective,
        plan: EpochPlan,
        share: StepShare,
        validation_batches: Callable[[], Any],
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        super().__init__()
        self._collective = collective
        self._plan = plan
        self._share = share
        self._validation_batches = validation_batches
        # Without a model: Keras' fit has given them theirs, and some start anew when they get one.
        self._callbacks = keras.callbacks.CallbackList(list(callbacks))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        if self._collective.world_size > 1:
            logs.update(global_logs(self.model, self._collective, logs, self._share()))
            average_moving_statistics(self.model, self._collective, self._share.since(0))
            require_equal_weights(self.model, self._collective, epoch)
        if sum(self._plan.validation_rows):
            results = self._validate()
            logs.update({f"val_{name}": value for name, value in results.items()})

    def _validate(self) -> dict[str, Any]:
        steps = self._plan.validation_steps(self._collective.rank)
        if steps:
            self.model.evaluate(self._validation_batches(), steps=steps, verbose=0, callbacks=self._callbacks)
        else:
            self._callbacks.on_test_begin()
            self.model.reset_metrics()
            self._callbacks.on_test_end()
        return sum_metrics(self.model, self._collective)


class StepProgress(keras.callbacks.Callback):
    """Tells the reporter where training is, a few times a second."""

    def __init__(self, reporter: StepReporter, steps: int) -> None:
        super().__init__()
        self._reporter = reporter
        self._steps = steps
        self._epoch = 0
        self._told_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_INTERVAL_S:
            self._told_at = now
            self._reporter.step(self._epoch, batch + 1, self._steps, as_numbers(logs))


class AgreeToStop(keras.callbacks.Callback):
    """Lets all ranks stop together when a callback of any rank asks for it, and reports the epoch.

    A request in mid-epoch travels with the gradients or weights that the ranks exchange next, so
    that no rank is left alone in an allreduce: with gradients, the fit stops one step later than
    one process would.

    Args:
        collective: Connects the ranks.
        stop: Carries the request.
        reporter: Told of every epoch by rank 0.
        share: Tells whether this rank brings rows to a step. What callbacks make of stand-in rows is not listened to.
    """

    def __init__(self, collective: Collective, stop: StopSignal, reporter: Reporter, share: StepShare) -> None:
        super().__init__()
        self._share = share
        self._collective = collective
        self._stop = stop
        self._reporter = reporter

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._collective.world_size > 1:
            if not self._share.is_idle:
                self._stop.requested = self._stop.requested or self.model.stop_training
            self.model.stop_training = self._stop.agreed

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        wanted = self.model.stop_training or self._stop.requested
        self.model.stop_training = any_rank(wanted, self._collective)
        if self._collective.rank == 0:
            self._reporter.epoch(epoch, as_numbers(logs))
