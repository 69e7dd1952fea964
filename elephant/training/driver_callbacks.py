"""Callbacks that run on the driver, and the epochs that they see.

In an asynchronous fit these are all, as far as epochs go. In a synchronous one they are those that look at epochs
alone and do not decide about training (`runs_on_driver`); rank 0 waits for them at the end of each epoch.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from elephant.checkpoint.manager import CheckpointSink
from elephant.checkpoint.state import FitState, identity_of, is_saved, joined, named
from elephant.data.schema import DataSchema, RowSpec
from elephant.errors import UnsupportedError, warn_user
from elephant.modeling.variables import (
    assign_flat,
    constant_rate,
    metric_variables,
    parts_of,
    rated_optimizers,
    read_variables,
    seeded,
    write_variables,
)
from elephant.monitor.events import CallbacksDone, CallbacksDue, EpochEnded, EpochPart
from elephant.net.buffers import portable
from elephant.training.callbacks import BATCH_EVENTS, WRITERS, MountedFiles, check_callbacks, listens, updated_results
from elephant.training.checkpoints import continue_files, restore_states, states_of
from elephant.training.input.tensors import blank_batch
from elephant.training.job import NUMBERS, WEIGHTS, TrainingJob, as_numbers, prepared_model
from elephant.training.server_model import ServerModel
from elephant.training.warmup import LearningRateWarmup

if TYPE_CHECKING:
    from elephant.parameter_server.control_client import ControlClient

logger = logging.getLogger(__name__)
RowShapes = Mapping[str, Sequence[int]]

# What they do at the end of an epoch follows from its numbers alone.
_WITHOUT_WEIGHTS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
)
_EPOCHS = ("on_epoch_begin", "on_epoch_end")
# They decide about training, and run on the ranks of a synchronous fit, beside what they decide about.
_DECIDING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)
# Of these, those that decide by numbers alone.
_FOLLOWING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)
# Callbacks that a fit of this process has at the moment, by their ids.
_in_use: set[int] = set()
_reserving = threading.Lock()
# Packages whose callbacks log to the run that the user has opened, and may look at batches for details of it.
_TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "optuna", "optuna_integration", "wandb")


def runs_on_driver(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback of a synchronous fit runs on the driver.

    It does when it looks at epochs, and at the begin and end of training, alone. Those of Keras that decide about
    training run on the workers, and those of experiment trackers on the driver.

    >>> runs_on_driver(keras.callbacks.CSVLogger("log.csv")), runs_on_driver(keras.callbacks.EarlyStopping())
    (True, False)
    """
    if isinstance(callback, _DECIDING):
        return False
    if isinstance(callback, WRITERS):
        # A profile of TensorBoard is one of the process that trains.
        often = getattr(callback, "save_freq", getattr(callback, "update_freq", "epoch")) != "epoch"
        of_keras = next(kind for kind in type(callback).__mro__ if kind.__module__.startswith("keras."))
        adds = any(getattr(type(callback), event) is not getattr(of_keras, event) for event in BATCH_EVENTS)
        return not (often or adds or getattr(callback, "_should_trace", False))
    return _is_of_tracker(callback) or not listens(callback, *BATCH_EVENTS)


class EpochSummaries:
    """Adds up what the metrics of all workers have summed up, so that an epoch has one number for each metric.

    A worker that is run again may report an epoch once more: the report that is of
    more steps stays, and of two equal ones the later. An epoch that is complete does not change any more.

    Args:
        model: A compiled model whose metrics may be used, such as the driver's copy.
        num_workers: Workers that report every epoch; those without rows report empty ones.
        first_epoch: The epoch that the fit begins with, from zero.
    """

    def __init__(self, model: keras.Model, schema: DataSchema, num_workers: int, first_epoch: int = 0) -> None:
        self._model = model
        self._schema = schema
        self._num_workers = num_workers
        self._parts: dict[int, dict[int, EpochPart]] = {}
        self._complete = set(range(first_epoch))

    @property
    def pending(self) -> list[EpochPart]:
        """Reports of epochs that other workers have not ended yet."""
        return [part for parts in self._parts.values() for part in parts.values()]

    def add(self, part: EpochPart) -> dict[str, Any] | None:
        """Keeps a worker's report; returns the logs of its epoch when it was the last that was missing.

        Returns:
            One number, or list of numbers, by name; those of validation begin with ``val_``.
        """
        if part.epoch in self._complete:
            return None
        parts = self._parts.setdefault(part.epoch, {})
        if part.rank not in parts or part.steps >= parts[part.rank].steps:
            parts[part.rank] = part
        if len(parts) < self._num_workers:
            return None
        self._complete.add(part.epoch)
        return self._logs(list(self._parts.pop(part.epoch).values()))

    def _logs(self, parts: Sequence[EpochPart]) -> dict[str, Any]:
        trained = [part for part in parts if part.rows]
        row_shapes = next((part.row_shapes for part in parts if part.steps), None)
        results = self._results(trained, 0, row_shapes)
        logs: dict[str, Any] = {}
        for name in dict.fromkeys(name for part in trained for name in part.logs):
            value = results[name] if name in results else _average(trained, name)
            if value is not None:
                logs[name] = value
        if self._results([part for part in parts if part.val_rows], 1, row_shapes):
            validated = as_numbers(self._model.get_metrics_result())
            logs |= {f"val_{name}": validated[name] for name in sorted(validated)}
        return logs

    def _results(self, parts: Sequence[EpochPart], which: int, row_shapes: RowShapes | None) -> dict[str, Any]:
        """Returns the metrics' results from the workers' sums: nothing where they have other metrics."""
        sums = [np.asarray(part.arrays[which], np.float64) for part in parts]
        if not sums or len({len(values) for values in sums}) > 1 or not self._have_metrics(len(sums[0]), row_shapes):
            return {}
        assign_flat(metric_variables(self._model), np.sum(sums, axis=0))
        return updated_results(self._model)

    def _have_metrics(self, num_values: int, row_shapes: RowShapes | None) -> bool:
        """Returns whether the model's metrics hold so many values, after a first batch if they wait for one."""
        if not self._holds(num_values) and row_shapes is not None:
            # A model with steps of its own need not be able to test; its workers' logs are then averaged.
            try_batch(self._model, self._schema, row_shapes)
        return self._holds(num_values)

    def _holds(self, num_values: int) -> bool:
        # Compiled with an empty list of metrics, they have no values and wait for a first batch all the same.
        compiled = getattr(self._model, "_compile_metrics", None)
        known = sum(int(np.prod(variable.shape)) for variable in metric_variables(self._model))
        return known == num_values and (compiled is None or compiled.built)


def try_batch(model: keras.Model, schema: DataSchema, row_shapes: RowShapes) -> None:
    """Has a model see a batch, which makes its metrics, if it can."""
    try:
        model.test_on_batch(*blank_batch(schema, row_shapes))
    except Exception as error:
        logger.info("the driver's copy of the model cannot take a batch: %s", error)


def _average(parts: Sequence[EpochPart], name: str) -> float | None:
    """Returns the average of what a train_step of the model's own logged in each worker's last step."""
    known = [(part.rows, part.logs[name]) for part in parts if np.ndim(part.logs.get(name, [])) == 0]
    total = sum(rows for rows, _ in known)
    return float(sum(rows / total * value for rows, value in known)) if total else None


def check_asynchronous_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises for what is no callback, and for what cannot work where workers train at their own pace.

    Raises:
        ConfigurationError: Something is no callback.
        UnsupportedError: A callback needs steps that all workers take together.
    """
    check_callbacks(callbacks)
    for callback in callbacks:
        if isinstance(callback, LearningRateWarmup):
            raise UnsupportedError(
                "callbacks: LearningRateWarmup changes the rate between steps that all workers take together, and "
                "workers that train at their own pace take none. Let a schedule begin with the warm-up when you "
                "compile, such as keras.optimizers.schedules.CosineDecay(..., warmup_target=..., warmup_steps=...)."
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise UnsupportedError(
                f"callbacks: ModelCheckpoint runs on the driver, which sees epochs. Received: save_freq="
                f"{callback.save_freq!r}. Use save_freq='epoch', or mode='synchronous'."
            )


class DriverCallbacks:
    """Tells the user's own callback objects about epochs, and does what they ask for.

    Args:
        state: What the fit goes on from; None begins it.

    Attributes:
        stopped: Whether one of the callbacks has asked to stop, after which epochs do not count any more.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        epochs: int,
        state: FitState | None = None,
        refresh: Callable[[keras.Model], None],
        set_rate: Callable[[float], None],
        stop: Callable[[], None],
    ) -> None:
        self._model = model
        self._epochs = epochs
        self._own = list(callbacks)
        self._state = state
        self._refresh = refresh
        self._set_rate = set_rate
        self._stop = stop
        self._needs_weights = any(_reads_weights(callback, *_EPOCHS) for callback in callbacks)
        self._mounted = MountedFiles(callbacks)
        self._last = _LastOfAll()
        self._appending: list[tuple[keras.callbacks.CSVLogger, bool]] = []
        # The numbers of steps are each worker's own.
        self._callbacks = keras.callbacks.CallbackList(
            [*callbacks, self._mounted, self._last], model=model, epochs=epochs, steps=None, verbose=0
        )
        self._rate = constant_rate(model)
        self.stopped = False

    def begin(self) -> None:
        """Tells that training and its first epoch begin; before the workers start."""
        self._model.stop_training = False
        if self._state is None:
            self._callbacks.on_train_begin()
        else:
            self._begin_again(self._state)
        first = 0 if self._state is None else self._state.epochs
        if first < self._epochs:
            self._callbacks.on_epoch_begin(first)
        self._do_what_they_asked()

    def _begin_again(self, state: FitState) -> None:
        self._appending = [(one, one.append) for one in self._own if isinstance(one, keras.callbacks.CSVLogger)]
        continue_files(self._own)
        self._callbacks.on_train_begin()
        restore_states(zip(self._own, state.facts["callbacks"], strict=False), state.arrays)
        if self._rate is not None:
            # They have begun as if training did: some change the learning rate then.
            self._model.optimizer.learning_rate = self._rate

    def epoch_ended(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any] | None:
        """Tells that all workers have ended an epoch, and that the next one begins if there is one.

        Args:
            epoch: From zero.

        Returns:
            The logs with what callbacks have added, such as the learning rate; None after a callback has asked
            to stop: the epoch is one that workers had begun before they heard of it.
        """
        if self.stopped:
            return None
        if self._needs_weights:
            self._refresh(self._model)
        self._callbacks.on_epoch_end(epoch, logs)
        self._do_what_they_asked()
        if not self.stopped and epoch + 1 < self._epochs:
            self._callbacks.on_epoch_begin(epoch + 1)
            self._do_what_they_asked()
        return self._last.logs

    def end(self) -> None:
        """Gives the model what the servers have at the end, and tells that training has ended.

        What the model holds afterwards is the result: callbacks may have changed it, as
        ``EarlyStopping(restore_best_weights=True)`` does.
        """
        self._refresh(self._model)
        self._callbacks.on_train_end(self._last.logs)

    def close(self) -> None:
        """Gives the callbacks their own paths back, where a failure has kept training from ending."""
        self._mounted.close()
        for logger_of_epochs, appended in self._appending:
            logger_of_epochs.append = appended

    def _do_what_they_asked(self) -> None:
        rate = constant_rate(self._model)
        if rate is not None and rate != self._rate:
            self._rate = rate
            self._set_rate(rate)
        if self._model.stop_training and not self.stopped:
            self.stopped = True
            self._stop()


class _LastOfAll(keras.callbacks.Callback):
    """Keeps the logs as the callbacks before it have left them."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.logs = dict(logs or {})


def _reads_weights(callback: keras.callbacks.Callback, *events: str) -> bool:
    """Returns whether a callback may look at weights at one of the events."""
    if type(callback) is keras.callbacks.EarlyStopping:
        return bool(callback.restore_best_weights)
    if type(callback) is keras.callbacks.TensorBoard:
        return bool(callback.histogram_freq or callback.embeddings_freq)
    return listens(callback, *events) and type(callback) not in _WITHOUT_WEIGHTS


def places_on_driver(callbacks: Sequence[keras.callbacks.Callback]) -> set[int]:
    """Returns the places of those callbacks of a synchronous fit that run on the driver.

    They are those that `runs_on_driver`. As one of the user's own may put a number into the logs that one behind it
    decides by, those behind it follow it there.

    >>> class F1(keras.callbacks.Callback):
    ...     def on_epoch_end(self, epoch, logs=None):
    ...         logs["val_f1"] = 0.5
    >>> stopping = keras.callbacks.EarlyStopping("val_f1", mode="max")
    >>> sorted(places_on_driver([stopping, F1(), stopping]))
    [1, 2]
    """
    places, follows = set[int](), False
    for place, callback in enumerate(callbacks):
        if runs_on_driver(callback) or (follows and isinstance(callback, _FOLLOWING)):
            places.add(place)
            of_others = type(callback).__module__.startswith("keras.") or _is_of_tracker(callback)
            follows = follows or not of_others
    return places


def _may_hear_later(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback may hear of epochs when training has ended, and weights and rate are others."""
    if type(callback) is keras.callbacks.LambdaCallback:
        return True
    if isinstance(callback, keras.callbacks.TensorBoard):
        return False
    logs = _is_of_tracker(callback) and not isinstance(callback, WRITERS)
    return logs or not _reads_weights(callback, "on_train_begin", *_EPOCHS)


def _is_of_tracker(callback: keras.callbacks.Callback) -> bool:
    return any(kind.__module__.partition(".")[0] in _TRACKERS for kind in type(callback).__mro__)


class DriverEpochs:
    """Makes the fit's epochs of those of its workers, and runs the user's callbacks on them.

    Args:
        job: What the workers do; its callbacks are the user's own objects.
        keeper: Writes checkpoints; None makes none.

    Attributes:
        steps: Batches that workers have reported.
        wait_s: Seconds of these in which a worker waited for a server.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: ServerModel,
        servers: ControlClient,
        checkpoint_writer: CheckpointSink | None = None,
    ) -> None:
        self._job = job
        self._model = model
        self._servers = servers
        self._checkpoint_writer = checkpoint_writer
        self._history = {} if job.state is None else joined(job.state.history, {})
        self._summaries = EpochSummaries(model.model, job.model_schema, job.config.num_ranks, job.first_epoch)
        for part in pending_parts(job):
            self._summaries.add(part)
        self._callbacks = DriverCallbacks(
            model.model,
            job.callbacks,
            epochs=job.config.epochs,
            state=job.state,
            refresh=self._refresh,
            set_rate=servers.set_rate,
            stop=servers.stop,
        )
        self._asked_to_stop = False
        self.steps = 0
        self.wait_s = 0.0

    def _refresh(self, model: keras.Model) -> None:
        kept = self._servers.fetch()
        self._model.take(kept.values, kept.slots, kept.iterations, kept.state)

    def begin(self) -> None:
        """Tells the callbacks that training begins."""
        self._callbacks.begin()

    def add(self, part: EpochPart) -> list[EpochEnded]:
        """Keeps a worker's epoch; returns the fit's epoch when it was the last that was missing, and counts."""
        self.steps += part.steps
        self.wait_s += part.wait_s
        logs = self._summaries.add(part)
        if logs is None:
            return []
        logs = self._callbacks.epoch_ended(part.epoch, logs)
        if logs is None:
            return []
        self._history = joined(self._history, {name: [value] for name, value in as_numbers(logs).items()})
        if self._checkpoint_writer is not None and is_saved(part.epoch + 1, self._job.config, stopped=self.stopped):
            self._checkpoint_writer.keep(self._state(part.epoch + 1))
        return [EpochEnded(rank=0, epoch=part.epoch, logs=logs)]

    def _state(self, done: int) -> FitState:
        """Returns the state from which the fit can go on; workers that were faster are further on, and stay so."""
        kept = self._servers.keep()
        fetched = kept.fetched
        self._model.take(fetched.values, fetched.slots, fetched.iterations, fetched.state)
        states, of_callbacks = states_of(self._job.callbacks)
        arrays, pending = {**named("model", self._model.variables()), **of_callbacks}, []
        for index, part in enumerate(self._summaries.pending):
            pending.append({one.name: getattr(part, one.name) for one in fields(part) if one.name != "arrays"})
            arrays |= named(f"part/{index}", [np.asarray(array) for array in part.arrays])
        facts = {
            "fit": identity_of(self._job.config),
            "rows": self._model.rows.to_json(),
            "stopped": self.stopped,
            "optimizer_names": self._model.optimizer_names,
            "callbacks": states,
            "ledgers": [{str(partition): entry for partition, entry in one.items()} for one in kept.ledgers],
            "parts": pending,
        }
        return FitState(epochs=done, history=self._history, arrays=arrays, facts=facts)

    def stop(self) -> None:
        """Has all workers stop: one of them has asked for it."""
        self._asked_to_stop = True
        self._servers.stop()

    @property
    def stopped(self) -> bool:
        """Whether workers were told to stop before the last epoch's end."""
        return self._asked_to_stop or self._callbacks.stopped

    def remind(self) -> None:
        """Tells servers that have come back what callbacks have asked for."""
        self._servers.remind()

    def end(self) -> None:
        """Gives the model what the servers keep, and tells the callbacks that training has ended."""
        self._callbacks.end()

    def close(self) -> None:
        """Lets go of what callbacks hold, whether training has ended well or not."""
        self._callbacks.close()


def pending_parts(job: TrainingJob) -> list[EpochPart]:
    """Returns the parts of unfinished epochs that workers had reported before a fit was interrupted."""
    state = job.state
    if state is None or state.facts["fit"]["num_workers"] != job.config.num_ranks:
        return []
    return [
        EpochPart(**about, arrays=tuple(state.group(f"part/{index}")))
        for index, about in enumerate(state.facts["parts"])
    ]


class SynchronousEpochs:
    """Runs callbacks on the driver at the begin and end of a synchronous fit, and at the ends of its epochs.

    Where executors do not reach the driver, it hears of all epochs when training has ended, and nothing that callbacks
    ask for can be done any more.

    Args:
        job: The fit, with the user's own callbacks.
        replayed: Whether epochs are heard of when training has ended.

    Attributes:
        told: What rank 0 is to tell: `NUMBERS` or `WEIGHTS`; None where no callback runs here, or it tells later.
    """

    def __init__(self, job: TrainingJob, *, replayed: bool = False) -> None:
        self._job = job
        given = (*job.callbacks, *job.driver_callbacks)
        on_driver = places_on_driver(job.callbacks)
        if replayed:
            on_driver = {place for place in on_driver if _may_hear_later(job.callbacks[place])}
            _require_late(job.driver_callbacks)
        self._places = [place for place in range(len(given)) if place in on_driver or place >= len(job.callbacks)]
        self._all = list(given)
        self._own: list[keras.callbacks.Callback] = []
        self._replayed = replayed
        self._callbacks: DriverCallbacks | None = None
        self._model: keras.Model | None = None
        self._result: Sequence[np.ndarray] | None = None
        self._stops = False
        self._rate: float | None = None
        self.told: str | None = None
        if self.callbacks and not replayed:
            looks = any(_reads_weights(callback, "on_train_begin", *_EPOCHS) for callback in self.callbacks)
            self.told = WEIGHTS if looks else NUMBERS

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Those that run on the driver."""
        return [self._all[place] for place in self._places]

    def places(self) -> str:
        """Returns a line that says where each callback runs."""
        here = [type(callback).__name__ for callback in self.callbacks]
        places = set(self._places)
        there = [type(callback).__name__ for place, callback in enumerate(self._all) if place not in places]
        by_place = {"the driver": here, "the workers": there}
        named = [f"{', '.join(names)} on {place}" for place, names in by_place.items() if names]
        return f"callbacks: {'; '.join(named)}"

    def job_of_ranks(self) -> TrainingJob:
        """Returns the job of the ranks' processes: without what runs here."""
        here = set(self._places)
        there = (keras.callbacks.Callback() if place in here else one for place, one in enumerate(self._job.callbacks))
        return replace(self._job, callbacks=tuple(there), driver_callbacks=(), told_driver=self.told)

    def take_turn(self, due: CallbacksDue) -> CallbacksDone:
        """Runs the callbacks for rank 0, which waits; returns what they ask for.

        Raises:
            UnsupportedError: One has changed what does not travel to the workers.
        """
        model = self._synchronized(due)
        before = _values(model.weights) if due.arrays else []
        rates = self._other_rates(model)
        self._stops, self._rate = False, None
        if due.epoch is None:
            self._begin(model)
        logs = due.logs if due.epoch is None else self._end_epoch(due.epoch, due.logs, stopped=due.stopped)
        if self._other_rates(model) != rates:
            raise UnsupportedError(
                "callbacks: expected one on the driver to change the learning rate of model.optimizer alone. Received: "
                "another rate of another optimizer of the model, which does not travel to the workers. Give the "
                "callback a method for batches, such as on_train_batch_end, so that it runs on the workers."
            )
        after = _values(model.weights) if due.arrays else []
        changed = not all(one.tobytes() == other.tobytes() for one, other in zip(before, after, strict=True))
        arrays = tuple(portable(value) for value in after) if changed else ()
        return CallbacksDone(rank=0, stop=self._stops, logs=logs, learning_rate=self._rate, arrays=arrays)

    def _other_rates(self, model: keras.Model) -> list[float]:
        """Returns the learning rates that a callback may set, but for that of the model's own optimizer."""
        own = {id(part) for part in parts_of(model.optimizer)} if constant_rate(model) is not None else set()
        others = [one for one in rated_optimizers(model) if id(one) not in own]
        constant = [one for one in others if not isinstance(one._learning_rate, LearningRateSchedule)]
        return [float(keras.ops.convert_to_numpy(one.learning_rate)) for one in constant]

    def _synchronized(self, due: CallbacksDue) -> keras.Model:
        """Returns the driver's copy of the model, as far as rank 0 has told of its own."""
        is_new = self._model is None
        model = self._built(RowSpec.from_json(due.rows))
        if is_new and any(hasattr(callback, "monitor_op") for callback in self.callbacks):
            # They look at the model's metrics, which a first batch makes.
            try_batch(model, self._job.model_schema, due.row_shapes)
        if due.arrays:
            write_variables(model, due.arrays)
        else:
            parts_of(model.optimizer)[0].iterations.assign(due.iterations)
            if due.learning_rate is not None:
                model.optimizer.learning_rate = due.learning_rate
        return model

    def _built(self, rows: RowSpec) -> keras.Model:
        if self._model is None:
            job = self._job
            with job.model.settings.applied(), seeded(job.config.seed):
                self._model = prepared_model(job, rows, num_ranks=job.config.num_ranks)
        return self._model

    def _begin(self, model: keras.Model) -> DriverCallbacks:
        self._own = _reserved(self.callbacks)
        for place, callback in zip(self._places, self._own, strict=True):
            self._all[place] = callback
        state = self._job.state
        if state is not None:
            # A checkpoint of before may have fewer callbacks.
            known = dict(enumerate(state.facts["callbacks"]))
            begun_anew = [{"class": type(callback).__name__, "values": {}} for callback in self._all]
            kept = [known.get(place, begun_anew[place]) for place in self._places]
            state = replace(state, facts={**state.facts, "callbacks": kept})
        self._callbacks = DriverCallbacks(
            model,
            self.callbacks,
            epochs=self._job.config.epochs,
            state=state,
            refresh=self._refresh,
            set_rate=self._set_rate,
            stop=self._stop,
        )
        self._callbacks.begin()
        return self._callbacks

    def _end_epoch(self, epoch: int, logs: dict[str, Any], *, stopped: bool) -> dict[str, Any]:
        if self._callbacks is None or self._model is None:
            return logs
        self._model.stop_training = stopped
        return as_numbers(self._callbacks.epoch_ended(epoch, dict(logs)) or logs)

    def _refresh(self, model: keras.Model) -> None:
        if self._result is not None:
            write_variables(model, self._result)

    def _set_rate(self, rate: float) -> None:
        self._rate = rate

    def _stop(self) -> None:
        self._stops = True

    def with_states(self, state: FitState) -> FitState:
        """Returns a state of the fit as rank 0 knows it, with what the callbacks here remember."""
        here = set(self._places)
        states, arrays = states_of(
            [one if at in here else keras.callbacks.Callback() for at, one in enumerate(self._all)]
        )
        known = dict(enumerate(state.facts["callbacks"]))
        states = [one if place in here else known[place] for place, one in enumerate(states)]
        return replace(state, facts={**state.facts, "callbacks": states}, arrays={**state.arrays, **arrays})

    def end(self, variables: Sequence[np.ndarray], rows: RowSpec, epochs: Sequence[EpochEnded]) -> list[np.ndarray]:
        """Ends training for the callbacks; returns the model's variables as they have left them.

        Args:
            variables: The trained model's.
            rows: What one row of its input is.
            epochs: All, where they are heard of now.
        """
        if not self._places:
            return list(variables)
        model = self._built(rows)
        self._result = variables
        if self._callbacks is None:
            write_variables(model, variables)
            callbacks = self._begin(model)
            for ended in epochs:
                callbacks.stopped = False
                self._end_epoch(ended.epoch, dict(ended.logs), stopped=False)
            if self._stops:
                warn_user(
                    "A callback has asked to stop training, which had ended before it heard of any epoch: executors do "
                    "not reach the driver. Let keras.callbacks.EarlyStopping decide, which runs on the workers."
                )
        if self._callbacks is not None:
            self._callbacks.end()
        return list(variables) if self._replayed else read_variables(model)

    def close(self) -> None:
        """Lets go of the callbacks, whether training has ended well or not."""
        if self._callbacks is not None:
            self._callbacks.close()
        _release(self._own)


def _values(variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _require_late(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises UnsupportedError for callbacks of Keras that make no sense when training has ended."""
    for callback in callbacks:
        writes = isinstance(callback, WRITERS) and not _may_hear_later(callback)
        if writes or isinstance(callback, _DECIDING):
            raise UnsupportedError(
                f"driverCallbacks: {type(callback).__name__} looks at weights or decides about training, and executors "
                "do not reach this driver, which hears of epochs when training has ended. Pass it in callbacks: it "
                "then runs on the workers."
            )


def _reserved(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns the user's own objects, but copies of those that another fit of this process has at this moment."""
    with _reserving:
        reserved = [copy.copy(callback) if id(callback) in _in_use else callback for callback in callbacks]
        _in_use.update(id(callback) for callback in reserved)
    return reserved


def _release(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Leaves callbacks to other fits."""
    with _reserving:
        _in_use.difference_update(id(callback) for callback in callbacks)
