"""Turns of callbacks on the driver in a synchronous fit: which run there, and what they ask for.

The table of `elephant.rank.callbacks.callback_rules` says which. Rank 0 waits for them at the end of each
epoch (`elephant.rank.callbacks.rank_callbacks.DriverTurn`).
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import has_schedule
from elephant.checkpoint.state import FitState
from elephant.data.schema import RowSpec
from elephant.driver.driver_callbacks import DriverCallbacks
from elephant.driver.driver_epochs import try_batch
from elephant.errors import UnsupportedError, warn_user
from elephant.modeling.variables import (
    constant_rate,
    on_cpu,
    parts_of,
    rated_optimizers,
    read_values,
    read_variables,
    seeded,
    write_variables,
)
from elephant.monitor.events import CallbacksDone, CallbacksDue, EpochEnded
from elephant.net.buffers import portable
from elephant.rank.callbacks.callback_rules import (
    EPOCH_EVENTS,
    Place,
    is_of_tool,
    places_of,
    reads_weights,
    require_late,
)
from elephant.rank.callbacks.shared_state import SharedState, assign, contents_of, names_of
from elephant.rank.checkpoints import states_of
from elephant.rank.job import NUMBERS, WEIGHTS, TrainingJob, as_numbers, prepared_model

# Callbacks that a fit of this process has at the moment, by their ids.
_in_use: set[int] = set()
_reserving = threading.Lock()


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
        shared = SharedState(given, job.model, job.preprocessing.given)
        if replayed:
            require_late(job.driver_callbacks)
        places = places_of(job.callbacks, shared.sharing, later=replayed)
        places += [Place.DRIVER] * len(job.driver_callbacks)
        self._places = [index for index, place in enumerate(places) if place is Place.DRIVER]
        self._all = list(given)
        self._outside = _outside(given, places, shared)
        self._changeable = {
            key: thing
            for place in self._places
            if not is_of_tool(given[place])
            for key, thing in shared.changeable(place).items()
        }
        self._own: list[keras.callbacks.Callback] = []
        self._replayed = replayed
        self._callbacks: DriverCallbacks | None = None
        self._model: keras.Model | None = None
        self._result: Sequence[np.ndarray] | None = None
        self._stops = False
        self._rate: float | None = None
        self.told: str | None = None
        if self.callbacks and not replayed:
            looks = any(reads_weights(callback, "on_train_begin", *EPOCH_EVENTS) for callback in self.callbacks)
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
        return replace(
            self._job, callbacks=tuple(there), driver_callbacks=(), driver_reads=self.told, outside=tuple(self._outside)
        )

    @on_cpu()
    def take_turn(self, due: CallbacksDue) -> CallbacksDone:
        """Runs the callbacks for rank 0, which waits; returns what they ask for.

        Raises:
            UnsupportedError: One has changed what does not travel to the workers.
        """
        model = self._synchronized(due)
        before = read_values(model.weights) if due.arrays else []
        rates = self._other_rates(model)
        self._stops, self._rate = False, None
        with self._unshared_changes():
            if due.epoch is None:
                self._begin(model, due.steps)
            logs = due.logs if due.epoch is None else self._end_epoch(due.epoch, due.logs, stopped=due.stopped)
        if self._other_rates(model) != rates:
            raise UnsupportedError(
                "callbacks: expected one on the driver to change the learning rate of model.optimizer alone. Received: "
                "another rate of another optimizer of the model, which does not travel to the workers. Give the "
                "callback a method for batches, such as on_train_batch_end, so that it runs on the workers."
            )
        after = read_values(model.weights) if due.arrays else []
        changed = not all(one.tobytes() == other.tobytes() for one, other in zip(before, after, strict=True))
        arrays = tuple(portable(value) for value in after) if changed else ()
        return CallbacksDone(rank=0, stop=self._stops, logs=logs, learning_rate=self._rate, arrays=arrays)

    @contextlib.contextmanager
    def _unshared_changes(self) -> Iterator[None]:
        """Raises UnsupportedError where callbacks change in the block what the ranks have copies of."""
        before = contents_of(self._changeable)
        yield
        after = contents_of(self._changeable)
        changed = {key: thing for key, thing in self._changeable.items() if before[key] != after[key]}
        if changed:
            raise UnsupportedError(
                "callbacks: expected one on the driver to change nothing that the model, its loss or a function on "
                f"batches uses too. Received: a change of {names_of(changed.values())}, of which the workers have "
                "copies. Let them share a keras.Variable outside of the model, reach the model as self.model, or give "
                "the callback a method for batches, such as on_train_batch_end, so that it runs on the workers."
            )

    def _other_rates(self, model: keras.Model) -> list[float]:
        """Returns the learning rates that a callback may set, but for that of the model's own optimizer."""
        own = {id(part) for part in parts_of(model.optimizer)} if constant_rate(model) is not None else set()
        others = [one for one in rated_optimizers(model) if id(one) not in own]
        constant = [one for one in others if not has_schedule(one)]
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

    def _begin(self, model: keras.Model, steps: int | None) -> DriverCallbacks:
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
            steps=steps,
            state=state,
            refresh=self._refresh,
            set_rate=self._set_rate,
            stop=self._stop,
            folder_of=self._job.folder_of,
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
        # At the end of an epoch those on the ranks have not heard that the next one begins.
        begun = self._callbacks is not None and self._callbacks.has_begun(state.epochs)
        facts = {**state.facts, "callbacks": states, "begun": begun}
        return replace(state, facts=facts, arrays={**state.arrays, **arrays})

    @on_cpu()
    def end(self, variables: Sequence[np.ndarray], rows: RowSpec, epochs: Sequence[EpochEnded]) -> list[np.ndarray]:
        """Ends training for the callbacks; returns the model's variables as they have left them.

        Args:
            variables: The trained model's.
            rows: What one row of its input is.
            epochs: All, where they are heard of now.
        """
        if self._outside:
            variables, of_outside = variables[: -len(self._outside)], variables[-len(self._outside) :]
            for variable, value in zip(self._outside, of_outside, strict=True):
                assign(variable, value)
        if not self._places:
            return list(variables)
        model = self._built(rows)
        self._result = variables
        if self._callbacks is None:
            write_variables(model, variables)
            with self._unshared_changes():
                callbacks = self._begin(model, None)
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

    def begin_again(self, state: FitState | None) -> None:
        """Has the callbacks go on from a state of before, when training begins once more; None is its begin."""
        self.close()
        self._callbacks, self._own = None, []
        self._job = replace(self._job, state=state)

    def close(self) -> None:
        """Lets go of the callbacks, whether training has ended well or not."""
        if self._callbacks is not None:
            self._callbacks.close()
        _release(self._own)


def _outside(callbacks: Sequence[keras.callbacks.Callback], places: Sequence[Place], shared: SharedState) -> list[Any]:
    """Returns the variables outside of the model that callbacks on the workers share with it.

    Raises:
        UnsupportedError: A callback shares variables with the model, and does not run where all of these are.
    """
    outside: dict[int, Any] = {}
    for index, (callback, place) in enumerate(zip(callbacks, places, strict=True)):
        name, here = type(callback).__name__, place is Place.DRIVER
        if is_of_tool(callback):
            continue
        if shared.is_shared(index) and place is not Place.ALL_RANKS:
            raise UnsupportedError(
                f"callbacks: expected {name}, which runs on {place.value}, to share no variable "
                f"with the model. Received: {names_of(shared.outside(index)) or 'one that the model uses'}, of which "
                "each worker has its own. Set it in a callback of your own in callbacks, which runs on all workers."
            )
        if not here and shared.of_model(index):
            raise UnsupportedError(
                f"callbacks: expected {name}, which runs on the workers, to reach the model as self.model. Received: "
                f"one that reaches {names_of(shared.of_model(index))} of the model that you passed, by a name of "
                "its own. Each worker trains another copy of the model."
            )
        outside |= {} if here else {id(variable): variable for variable in shared.outside(index)}
    return list(outside.values())


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
