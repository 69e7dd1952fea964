"""Callbacks of elephant's own in training processes, and their order."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any

import keras
import numpy as np

from elephant.backends.gradient_averager import StopSignal
from elephant.collective.communicator import Communicator
from elephant.errors import ConfigurationError, TrainingError
from elephant.modeling.layers.sync_batch_norm import synchronized_layers
from elephant.modeling.variables import (
    constant_rate,
    metric_variables,
    moving_statistics,
    optimizer_slots,
    parts_of,
)
from elephant.monitor.events import CallbacksDue, RankEpoch, StepEnded
from elephant.monitor.trace import PROCESS
from elephant.net.buffers import portable
from elephant.rank.callbacks.divided_optimizer import DividedOptimizer, read_whole
from elephant.rank.input.feed import BatchFeed
from elephant.rank.job import WEIGHTS, ExchangeCounts, Reporter, StepReporter, as_numbers
from elephant.rank.metrics.metric_sums import global_logs, sum_metrics
from elephant.rank.rank_progress import RankWeight, StepTimes
from elephant.training.moving_statistics import average_moving_statistics

_PROGRESS_INTERVAL_S = 0.25
# Reports of all ranks together.
_PROGRESS_PER_S = 100


class CallbackOrder(Enum):
    """Order of the callbacks of a rank, from the first to the last; each mode of training has some of them."""

    STEPS = auto()  # counts the rank's steps
    IDLE = auto()  # undoes what steps without rows did, before anything looks at the model
    EXCHANGE = auto()  # gives the model the weights that ranks, or workers and servers, have agreed on
    EPOCH = auto()  # makes the epoch's numbers those of all workers, so that the user's callbacks see them
    WHOLE = auto()  # puts a divided model together for those that look at it
    OF_USER = auto()
    OUTSIDE = auto()  # shares the variables that the user's callbacks have set
    FILES = auto()  # copies the files that they have written
    PROGRESS = auto()  # reports, after those that may take long
    STOP = auto()  # has all ranks stop at the same step, when any callback before has asked for it
    DRIVER = auto()  # waits for the callbacks on the driver
    CHECKPOINT = auto()  # keeps the state that all of these have left
    MOVES = auto()  # finds out whether rows are to be on other ranks in the next epoch
    LOSSES = auto()  # tries losses in a part of the time that is none of a step's


def in_order(
    callbacks: Mapping[CallbackOrder, Sequence[keras.callbacks.Callback]], times: StepTimes | None
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of a rank in their order.

    Args:
        callbacks: By what they are there for.
        times: Notes when each has ended an epoch; None where the fit leaves no trace.
    """
    listed = [one for part in CallbackOrder if part is not CallbackOrder.LOSSES for one in callbacks.get(part, ())]
    return [*(listed if times is None else times.around(listed)), *callbacks.get(CallbackOrder.LOSSES, ())]


def require_equal_weights(model: keras.Model, communicator: Communicator, epoch: int) -> None:
    """Raises TrainingError on every rank when the ranks' weights have drifted apart."""
    digest = 0
    for variable in model.trainable_variables:
        digest = zlib.crc32(np.asarray(keras.ops.convert_to_numpy(variable)).tobytes(), digest)
    digests = [int(part[0]) for part in communicator.allgather(np.array([digest], dtype=np.int64))]
    if len(set(digests)) > 1:
        raise TrainingError(
            f"expected equal weights on all ranks after epoch {epoch + 1}. Received: different ones "
            f"(checksums {', '.join(f'{value:08x}' for value in digests)}). A callback or train_step that changes "
            "weights must do the same on every rank, and only gradients that model.optimizer applies are averaged."
        )


def share_variables(variables: Sequence[keras.Variable], communicator: Communicator) -> None:
    """Gives every rank the values that variables have on rank 0."""
    for variable in variables:
        value = np.array(keras.ops.convert_to_numpy(variable), order="C")
        communicator.broadcast_(value)
        variable.assign(value)


def any_rank(flag: bool, communicator: Communicator) -> bool:
    """Returns whether the flag is set on any rank."""
    flags = np.array([flag], dtype=np.int64)
    communicator.allreduce_(flags, op="max")
    return bool(flags[0])


def require_averaged_weights(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ConfigurationError where a callback swaps in averages of weights, and no optimizer makes any."""
    swaps = any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks)
    if swaps and not any(getattr(part, "use_ema", False) for part in parts_of(model.optimizer)):
        raise ConfigurationError(
            "callbacks: expected an optimizer with use_ema=True for SwapEMAWeights, which swaps in its averages of "
            f"weights. Received: {model.optimizer.name!r} with use_ema=False. Pass use_ema=True to the optimizer, or "
            "leave the callback out."
        )


class IdleSteps(keras.callbacks.Callback):
    """Undoes what the stand-in rows of a rank that has run out do to its metrics and moving statistics.

    The stand-in's gradient has the weight zero. Its forward pass still counts in the
    metrics and moves batch normalization's averages: both are kept before the first of several
    idle steps and put back after the last. A rank that trains alone between
    two averages would also apply the stand-in's gradient: its optimizer's state is kept too.
    """

    def __init__(self, weight: RankWeight, *, keep_optimizers: bool = False, synchronized: bool = False) -> None:
        super().__init__()
        self._weight = weight
        self._keep_optimizers = keep_optimizers
        self._synchronised = synchronized
        self._saved: list[tuple[keras.Variable, np.ndarray]] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._saved = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._weight.is_idle:
            self.put_back()
        elif self._saved is None:
            layers = synchronized_layers(self.model, self._synchronised) if not self._keep_optimizers else []
            shared = {id(variable) for layer in layers for variable in layer.non_trainable_variables}
            variables = [*metric_variables(self.model), *moving_statistics(self.model)]
            variables = [variable for variable in variables if id(variable) not in shared]
            if self._keep_optimizers:
                variables += optimizer_slots(self.model)
            self._saved = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in variables]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Undoes what there is to undo, as for who looks at the model between two idle steps."""
        if self._saved is not None:
            # Metrics that were first built in an idle step were not kept: they had counted nothing.
            self.model.reset_metrics()
            for variable, value in self._saved:
                variable.assign(value)
            self._saved = None


class GlobalEpoch(keras.callbacks.Callback):
    """Makes the end of an epoch one for all ranks: metrics, moving statistics, validation."""

    def __init__(
        self,
        communicator: Communicator,
        weight: RankWeight,
        validation_batches: Callable[[], Any],
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._weight = weight
        self._validation_batches = validation_batches
        self._callbacks = TestCallbacks(list(callbacks))
        self._logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        if self._communicator.world_size > 1:
            logs.update(global_logs(self.model, self._communicator, logs, self._weight()))
            average_moving_statistics(self.model, self._communicator, self._weight.since(0))
            require_equal_weights(self.model, self._communicator, epoch)
        if sum(self._weight.plan.validation_rows):
            results = self._validate()
            logs.update({f"val_{name}": value for name, value in results.items()})
        self._logs = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # Keras ends training with what it knows itself: the numbers of this rank, without validation.
        if logs is not None:
            logs.update(self._logs)

    def _validate(self) -> dict[str, Any]:
        steps = self._weight.plan.validation_steps(self._communicator.rank)
        if steps:
            self.model.evaluate(self._validation_batches(), steps=steps, verbose=0, callbacks=self._callbacks)
        else:
            self._callbacks.on_test_begin()
            self.model.reset_metrics()
        results = sum_metrics(self.model, self._communicator)
        self._callbacks.end_test(results)
        return results


class TestCallbacks(keras.callbacks.CallbackList):
    """The user's callbacks in an evaluation, which ends for them when the numbers of all workers are known.

    They are without a model: Keras' fit has given them theirs, and some start anew when they get one.
    """

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Does nothing: this rank's evaluation alone has ended."""

    def end_test(self, logs: dict[str, Any]) -> None:
        """Tells the callbacks that the evaluation has ended."""
        super().on_test_end(dict(logs))


class StepProgress(keras.callbacks.Callback):
    """Tells the reporter where this rank is, a few times a second, and at the end of an epoch where its seconds went.

    It comes after the callbacks that may take long.

    Args:
        feed: Where the rows come from.
        exchange: Counts what goes to other ranks, or to servers, and how long that takes.

    Attributes:
        ended_epoch: What was told of the last epoch that has ended; None in the first one.
    """

    def __init__(self, reporter: StepReporter, rank: int, feed: BatchFeed, exchange: ExchangeCounts) -> None:
        super().__init__()
        self.ended_epoch: RankEpoch | None = None
        self._reporter = reporter
        self._rank = rank
        self._feed = feed
        self._exchange = exchange
        self._interval_s = max(_PROGRESS_INTERVAL_S, feed.plan.world_size / _PROGRESS_PER_S)
        self._noted_at = 0.0
        self._is_traced = False
        # Told with the first epoch.
        self._start: Mapping[str, float] | None = None
        self._first_step_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._start is None:
            self._start = PROCESS.seconds
        self._epoch, self._first, self._last = epoch, -1, 0
        self._began = self._ended = self._step_began = time.monotonic()
        self._counted = (self._exchange.waited_s, self._feed.waited_s, self._exchange.bytes_sent)
        self._waited_s = self._exchange.waited_s

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._first < 0:
            # A worker may go on in the middle of an epoch.
            self._first = self._last = batch
            self._measure()
        self._step_began = time.monotonic()

    def _measure(self) -> None:
        self._measured = (self._last, time.monotonic(), self._exchange.waited_s)
        self._fed_s = self._feed.waited_s

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._ended, self._waited_s = time.monotonic(), self._exchange.waited_s
        self._feed.step_ended(self._step_began, batch + 1 - self._last)
        self._last = batch + 1
        if self._ended - self._noted_at >= self._interval_s:
            self._noted_at = self._ended
            self._report(as_numbers(logs))
        if not self._is_traced:
            self._is_traced = True
            waited_s = self._waited_s - self._measured[2] + self._feed.waited_s - self._fed_s
            self._first_step_s = max(self._ended - self._measured[1] - waited_s, 0.0)
            self._measure()

    def _report(self, logs: dict[str, Any]) -> None:
        first, began, waited_s = self._measured
        steps, seconds = self._last - first if self._is_traced else 0, self._ended - began
        self._reporter.send(
            StepEnded(
                rank=self._rank,
                epoch=self._epoch,
                step=self._last,
                steps=self._feed.plan.steps,
                logs=logs,
                rows=self._rows(self._first),
                rows_per_s=self._rows(first) / seconds if steps else 0.0,
                step_s=seconds / steps if steps else 0.0,
                wait_s=(self._exchange.waited_s - waited_s) / steps if steps else 0.0,
            )
        )

    def _rows(self, first: int) -> int:
        """Returns how many rows of its own the epoch's steps from ``first`` on have used."""
        plan = self._feed.plan
        first_number, last_number = plan.number(self._epoch, first), plan.number(self._epoch, self._last)
        return plan.rows_between(self._rank, first_number, last_number)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        waited_s, fed_s, bytes_sent = self._counted
        self.ended_epoch = RankEpoch(
            rank=self._rank,
            epoch=epoch,
            rows=self._rows(max(self._first, 0)),
            seconds=time.monotonic() - self._began,
            training_s=self._ended - self._began,
            wait_s=self._exchange.waited_s - waited_s,
            input_s=self._feed.waited_s - fed_s,
            bytes_sent=self._exchange.bytes_sent - bytes_sent,
            training_wait_s=self._waited_s - waited_s,
            first_step_s=self._first_step_s,
            start=self._start or {},
        )
        self._start, self._first_step_s = {}, 0.0
        self._reporter.send(self.ended_epoch)


class DriverTurn(keras.callbacks.Callback):
    """Has all ranks wait for callbacks on the driver, and do what these ask for.

    Args:
        told: `TrainingJob.driver_reads`.
        steps: Steps of an epoch.
        feed: Says what one row of the model's input is.
        reporter: Asked by rank 0.
        wait_s: How long other ranks may wait for rank 0 until they hear that it still waits.
        divided: The optimizer, of whose state ranks have parts; None where each has all.
        reading: Leaves out of a model what the driver does not get, for a ``with`` block.
    """

    def __init__(
        self,
        communicator: Communicator,
        reporter: Reporter,
        *,
        told: str,
        steps: int,
        feed: BatchFeed,
        wait_s: float,
        divided: DividedOptimizer | None = None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self._divided, self._reading = divided, reading
        self._steps = steps
        self._communicator = communicator
        self._reporter = reporter
        self._told = told
        self._feed = feed
        self._wait_s = wait_s
        self._has_begun = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Not when training begins: a checkpoint's optimizer is restored then, after all callbacks.
        if not self._has_begun:
            self._has_begun = True
            self._take_turn(None, {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        logs.update(self._take_turn(epoch, as_numbers(logs)))

    def _take_turn(self, epoch: int | None, logs: dict[str, Any]) -> dict[str, Any]:
        """Waits for the driver; returns the logs as its callbacks have left them, on rank 0."""
        is_first, weights = self._communicator.rank == 0, list[np.ndarray]()
        arrays: list[np.ndarray] = []
        if self._told == WEIGHTS:
            with self._reading():
                arrays = read_whole(self.model, self._divided, self._communicator)
        if is_first:
            self._reporter.send(self._due(epoch, logs, arrays))
        orders = np.array([1.0, 0.0, np.nan, 0.0])
        while orders[0]:
            done = self._reporter.await_callbacks(self._wait_s) if is_first else None
            if done is not None:
                logs, weights = done.logs, list(done.arrays)
                rate = np.nan if done.learning_rate is None else done.learning_rate
                orders = np.array([0.0, done.stop, rate, bool(weights)])
            if self._communicator.world_size > 1:
                self._communicator.broadcast_(orders)
        for variable, value in zip(self.model.weights, weights, strict=False):
            variable.assign(value)
        if orders[3] and self._communicator.world_size > 1:
            share_variables(self.model.weights, self._communicator)
        if not np.isnan(orders[2]):
            self.model.optimizer.learning_rate = float(orders[2])
        self.model.stop_training = self.model.stop_training or bool(orders[1])
        return logs

    def _due(self, epoch: int | None, logs: dict[str, Any], arrays: Sequence[np.ndarray]) -> CallbacksDue:
        return CallbacksDue(
            rank=0,
            epoch=epoch,
            steps=self._steps,
            logs=logs,
            stopped=bool(self.model.stop_training),
            learning_rate=constant_rate(self.model),
            iterations=int(keras.ops.convert_to_numpy(parts_of(self.model.optimizer)[0].iterations)),
            rows=self._feed.rows.to_json(),
            row_shapes={role: list(shape) for role, shape in self._feed.row_shapes.items()},
            arrays=[portable(value) for value in arrays],
        )


class CollectiveStop(keras.callbacks.Callback):
    """Lets all ranks stop together when a callback of any rank asks for it, and reports the epoch.

    Where a callback may ask for it after a step, the ranks ask each other after each. Else a request in mid-epoch,
    of a step of the model's own, travels with the gradients or weights that the ranks exchange next, so
    that no rank is left alone in an allreduce: with gradients, the fit stops one step later than
    one process would, or two where devices reduce them.

    Args:
        asks: Whether a callback may ask after a step; the same on all ranks.
        reporter: Told of every epoch by rank 0; None where the driver hears of epochs by `DriverTurn`.
    """

    def __init__(
        self,
        communicator: Communicator,
        stop: StopSignal,
        reporter: Reporter | None,
        weight: RankWeight,
        *,
        asks: bool,
    ) -> None:
        super().__init__()
        self._asks = asks
        self._weight = weight
        self._communicator = communicator
        self._stop = stop
        self._reporter = reporter

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Not ``self.model``, which on JAX puts the state of every step back into the variables.
        if self._communicator.world_size > 1:
            if not self._weight.is_idle:
                self._stop.requested = self._stop.requested or self._model.stop_training
            if self._asks:
                self._stop.agreed = any_rank(self._stop.requested, self._communicator)
            self._model.stop_training = self._stop.agreed

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        wanted = self.model.stop_training or self._stop.requested
        self.model.stop_training = any_rank(wanted, self._communicator)
        if self._communicator.rank == 0 and self._reporter is not None:
            self._reporter.epoch(epoch, as_numbers(logs))
