"""The callbacks of a worker that trains at its own pace: the user's for batches, and the end of its epochs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np

from elephant.backends.keras_private import forget_model
from elephant.data.epoch_plan import EpochPlan
from elephant.errors import UnsupportedError
from elephant.modeling.layers.sync_batch_norm import momenta, steps_of_all
from elephant.modeling.variables import assign_flat, flatten, metric_variables, moving_statistics
from elephant.monitor.events import EpochPart
from elephant.rank.asynchronous.push_strategies import WorkerExchange
from elephant.rank.callbacks.callback_rules import Duty, has_copies_on_workers, listens, rule_of
from elephant.rank.callbacks.shared_state import SharedState
from elephant.rank.input.feed import BatchFeed
from elephant.rank.job import StepReporter, as_numbers
from elephant.rank.process_pipe import begin_step
from elephant.rank.rank_progress import TrainingPosition


class WorkerReporter(StepReporter, Protocol):
    """Reporter of a worker."""

    def epoch_part(self, part: EpochPart) -> None:
        """This worker has ended an epoch."""

    def request_stop(self) -> None:
        """A callback on this worker wants all workers to stop."""


class AveragedState(Protocol):
    """The part of a worker's connections that averages what is no weight."""

    def average_state(self, state: np.ndarray, weight: float, epochs: int = 0) -> np.ndarray:
        """Returns the average over the workers."""


def worker_copies(
    callbacks: Sequence[keras.callbacks.Callback], shared: SharedState | None = None
) -> tuple[keras.callbacks.Callback, ...]:
    """Returns copies of those callbacks that run on workers, without the model that they had in another fit.

    Raises:
        UnsupportedError: One sets a variable that the model uses too, at an event that workers do not hear of.
    """
    sharing = set() if shared is None else shared.sharing
    for callback in (callbacks[index] for index in sharing):
        if listens(callback, "on_epoch_end") or rule_of(callback).duty is Duty.WRITES:
            raise UnsupportedError(
                f"callbacks: expected {type(callback).__name__}, which shares a variable with the model, to set it at "
                "the begin of an epoch or in a batch. Received: one with an on_epoch_end, which runs on the driver, "
                "while the variable is on the workers. Set it in on_epoch_begin, or use mode='synchronous'."
            )
    here = (one for index, one in enumerate(callbacks) if index in sharing or has_copies_on_workers(one))
    copies = tuple(map(copy.copy, here))
    for one in copies:
        forget_model(one)
    return copies


class BatchEvents(keras.callbacks.Callback):
    """Passes on what happens in batches to the user's callbacks on this worker, however many fits its training takes.

    The worker's progress is one of them, and hears of the ends of its epochs too.

    Their ``on_train_begin`` and ``on_epoch_begin`` are called here as well as on the driver: what these set,
    the events of batches look at. What ends an epoch or the training is the driver's.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        progress: keras.callbacks.Callback,
        position: TrainingPosition,
        *,
        epochs: int,
        exchange: WorkerExchange,
        reporter: WorkerReporter,
    ) -> None:
        super().__init__()
        self._callbacks = [*callbacks, progress]
        self._progress = progress
        self._position = position
        self._exchange = exchange
        self._params = {"verbose": 0, "epochs": epochs, "steps": position.steps}
        self._reporter = reporter
        self._begun = self._asked = False

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        for callback in self._callbacks if not self._begun else ():
            callback.set_params(self._params)
            callback.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks if not self._begun else ():
            callback.on_train_begin()
        self._begun = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks:
            callback.on_train_batch_begin(self._position.batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks:
            callback.on_train_batch_end(self._position.batch, logs)
        self._ask_to_stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._progress.on_epoch_end(epoch)
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        # Not ``self.model``, which on JAX puts the state of every step back into the variables.
        if self._model.stop_training and not self._exchange.stop and not self._asked:
            self._asked = True
            self._reporter.request_stop()


class WorkerSteps(keras.callbacks.Callback):
    """Keeps a worker's place; the first callback of all."""

    def __init__(self, position: TrainingPosition) -> None:
        super().__init__()
        self._position = position

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # The first one begins where this worker's last attempt, or its server, had got to.
        self._position.begin(epoch, first=self._position.first if epoch == self._position.epoch else 0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._position.batch = batch
        begin_step(self._position.number)


class WorkerEpochs(keras.callbacks.Callback):
    """End of a worker's epochs: pushes what it has learned, averages its state, evaluates its rows, and reports all.

    Args:
        servers: Average what is no weight; None where nobody does.
        in_rounds: Whether all workers take the same steps together.
    """

    def __init__(
        self,
        partition: int,
        plan: EpochPlan,
        feed: BatchFeed,
        exchange: WorkerExchange,
        servers: AveragedState | None,
        position: TrainingPosition,
        reporter: WorkerReporter,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        in_rounds: bool = False,
    ) -> None:
        super().__init__()
        self._in_rounds = in_rounds
        self._partition = partition
        self._plan = plan
        self._feed = feed
        self._exchange = exchange
        self._servers = servers
        self._position = position
        self._reporter = reporter
        # Without a model: they have theirs, and some start anew when they get one.
        self._callbacks = keras.callbacks.CallbackList(list(callbacks))
        self._waited_s = 0.0
        # The moving statistics when they were averaged last, and this worker's own in that average.
        self._base: np.ndarray | None = None
        self._own = np.empty(0)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._exchange.stop:
            self._model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        sums = flatten(metric_variables(self.model))
        complete = self._position.ends_epoch
        if not self._exchange.stop:
            self._exchange.flush()
        if complete and not self._exchange.stop:
            steps = 0 if self._in_rounds else self._position.taken
            self.average_state(self._rows_of_epoch(epoch, 0), steps=steps, epochs=epoch + 1)
        self._report(epoch, logs, sums, stopped=not complete)
        self.model.stop_training = self.model.stop_training or self._exchange.stop

    def repeat(self, epoch: int) -> None:
        """Reports an epoch that another attempt has trained to its end and perhaps not reported."""
        self._position.begin(epoch, first=self._position.steps)
        # Where peers have no servers, the driver needs its weights of then.
        self._exchange.on_epoch_end(epoch)
        if self._in_rounds:
            # The others wait for it; where the one before has sent its own, that counts.
            self.average_state(self._rows_of_epoch(epoch, 0), epochs=epoch + 1)
        self._report(epoch, {}, np.empty(0), stopped=False)

    def average_state(self, weight: float, steps: int = 0, epochs: int = 0) -> None:
        """Gives the model the average of all workers' moving statistics.

        Args:
            weight: What this worker's own count in it; with zero it only takes.
            steps: Steps that each of the others is taken to have made besides; zero where all made the same ones.
            epochs: Epochs that have ended.
        """
        statistics = moving_statistics(self.model)
        if not statistics or self._servers is None:
            return
        state = flatten(statistics)
        if steps and self._base is not None:
            # Nobody knows the others' steps: they are taken to be as many.
            momentum, workers = momenta(self.model, statistics), self._plan.world_size
            state = steps_of_all(self._own, self._base, state, momentum, steps=steps, workers=workers)
        average = self._servers.average_state(state, float(weight), epochs)
        self._own = state if weight else average
        assign_flat(statistics, average)
        self._base = flatten(statistics)

    def _report(self, epoch: int, logs: dict[str, Any] | None, sums: np.ndarray, *, stopped: bool) -> None:
        evaluated = np.empty(0)
        if not stopped and not self._exchange.stop:
            with self._exchange.fresh_weights():
                evaluated = self._evaluate()
        waited, self._waited_s = self._exchange.waited_s - self._waited_s, self._exchange.waited_s
        position = self._position
        self._reporter.epoch_part(
            EpochPart(
                rank=self._partition,
                epoch=epoch,
                rows=self._rows_of_epoch(epoch, position.first),
                val_rows=self._plan.validation_rows[self._partition] if len(evaluated) else 0,
                steps=position.taken,
                wait_s=waited,
                logs=as_numbers(logs),
                row_shapes={role: list(shape) for role, shape in self._feed.row_shapes.items()},
                stopped=stopped,
                arrays=(sums, evaluated),
            )
        )

    def _rows_of_epoch(self, epoch: int, first: int) -> int:
        """Returns how many rows the worker has used from the epoch's step ``first`` up to where it is."""
        last = self._plan.number(epoch, self._position.batch + 1)
        return self._plan.rows_between(self._partition, self._plan.number(epoch, first), last)

    def _evaluate(self) -> np.ndarray:
        steps = self._plan.validation_steps(self._partition)
        if not steps:
            return np.empty(0)
        self.model.evaluate(self._feed.validation_batches(), steps=steps, verbose=0, callbacks=self._callbacks)
        return flatten(metric_variables(self.model))
