"""The state of a synchronous fit at the end of an epoch: gathered from the ranks, and given back to them.

All ranks have the same weights then, and the same optimizer state where they exchange gradients: rank 0's is
kept. What is each rank's own is kept by rank: the random generators of its model, and, where ranks train
alone between two averages, the state of its optimizer. What callbacks remember is rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np

from elephant.checkpoint.state import FitState, identity_of, is_kept, joined, named, require_same_optimizers
from elephant.collective.communicator import Collective
from elephant.data.schema import RowSpec
from elephant.modeling.random_state import shared_generator
from elephant.modeling.variables import (
    OF_CHECKPOINT,
    added_scale,
    kept_optimizer,
    optimizer_names,
    optimizers_of,
    random_generators,
    rated_optimizers,
    read_variables,
    write_variables,
)
from elephant.training.callback_states import continue_files, restore_states, states_of
from elephant.training.job import TrainingJob, as_numbers

Arrays = dict[str, np.ndarray]


class StateReporter(Protocol):
    """Where rank 0 tells the state of the fit."""

    def keep(self, state: FitState) -> None:
        """A state that is to be kept."""


class KeepState(keras.callbacks.Callback):
    """Has the state of the fit kept every few epochs, and gives it back when a fit goes on; the last callback of all.

    Args:
        job: What the driver asked for, with the state to begin from.
        collective: Connects the ranks.
        reporter: Told of every state by rank 0.
        own: The user's callbacks that this rank runs.
        rows: What one row of the model's input is.
    """

    def __init__(
        self,
        job: TrainingJob,
        collective: Collective,
        reporter: StateReporter,
        *,
        own: Sequence[keras.callbacks.Callback],
        rows: RowSpec,
    ) -> None:
        super().__init__()
        self._job = job
        self._collective = collective
        self._reporter = reporter
        self._own = {id(callback) for callback in own}
        self._rows = rows
        self._history: dict[str, list[Any]] = {} if job.state is None else joined(job.state.history, {})

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        state = self._job.state
        if state is None:
            return
        pairs = zip(self._job.callbacks, state.facts["callbacks"], strict=False)
        restore_states([pair for pair in pairs if id(pair[0]) in self._own], state.arrays)
        # Callbacks have begun as if training did: some change the learning rate then.
        restore_optimizers(self.model, state, self._job, self._collective)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        done = epoch + 1
        self._history = joined(self._history, {name: [value] for name, value in as_numbers(logs).items()})
        stopped = bool(self.model.stop_training)
        if not is_kept(done, self._job.config, stopped=stopped):
            return
        own = own_arrays(self.model, self._job, self._collective)
        if self._collective.rank == 0:
            self._reporter.keep(self._state(done, own, stopped))

    def _state(self, done: int, own: Arrays, stopped: bool) -> FitState:
        states, of_callbacks = states_of(self._job.callbacks)
        others = optimizers_of(self.model)[1:]
        arrays = {**named("model", read_variables(self.model)), **own, **of_callbacks}
        arrays |= named("scale", _values(added_scale(self.model.optimizer)))
        for index, optimizer in enumerate(others):
            arrays |= named(f"optimizer/{index}", _values(optimizer.variables))
        facts = {
            "fit": identity_of(self._job.config),
            "rows": self._rows.to_json(),
            "num_workers": self._collective.world_size // self._job.config.gpus_per_worker,
            "stopped": stopped,
            "optimizer_names": optimizer_names(self.model),
            "callbacks": states,
            "optimizers": [_updated(self.model, optimizer) for optimizer in others],
        }
        return FitState(epochs=done, history=self._history, arrays=arrays, facts=facts)


def own_arrays(model: keras.Model, job: TrainingJob, collective: Collective) -> Arrays:
    """Returns what each rank has for itself, by rank; all ranks call it, and rank 0 gets the whole.

    Args:
        model: This rank's.
        job: What the driver asked for.
        collective: Connects the ranks.
    """
    arrays: Arrays = {}
    for rank, numbers in enumerate(collective.allgather(_random_numbers(model))):
        arrays[f"random/{rank}"] = np.array(numbers)
    if not job.config.averages_gradients and collective.world_size > 1:
        own = [value for optimizer in optimizers_of(model) for value in _values(optimizer.variables)]
        for rank in range(collective.world_size):
            for index, value in enumerate(own):
                flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy()
                collective.broadcast_(flat, root=rank)
                if collective.rank == 0:
                    arrays[f"local/{rank}/{index}"] = flat.view(value.dtype).reshape(value.shape)
    return arrays


def restore(model: keras.Model, job: TrainingJob, collective: Collective) -> None:
    """Gives a rank's model what it had at the end of the epoch that a fit goes on from; nothing where it begins.

    Args:
        model: As it is built, with its optimizer.
        job: What the driver asked for.
        collective: Connects the ranks.

    Raises:
        ConfigurationError: The state is that of another model.
    """
    if job.state is None:
        return
    require_same_optimizers(job.state.facts, optimizer_names(model))
    continue_files(job.callbacks)
    write_variables(model, job.state.group("model"), remedy=OF_CHECKPOINT)
    restore_optimizers(model, job.state, job, collective)
    numbers = job.state.arrays.get(f"random/{collective.rank}")
    # A rank that there was not before has been seeded as any new one is.
    if numbers is not None:
        _restore_random_numbers(model, numbers)


def restore_optimizers(model: keras.Model, state: FitState, job: TrainingJob, collective: Collective) -> None:
    """Gives a model's optimizers what they had, but for a rate that follows the number of workers."""
    optimizers = optimizers_of(model)
    whole = state.group("model")
    first = kept_optimizer(optimizers[0])
    _assign(first, whole[len(whole) - len(first.variables) :])
    for variable, value in zip(added_scale(optimizers[0]), state.group("scale"), strict=False):
        variable.assign(value)
    for index, (optimizer, updated) in enumerate(zip(optimizers[1:], state.facts["optimizers"], strict=False)):
        if updated and not optimizer.built:
            optimizer.build([model.weights[place] for place in updated])
        _assign(optimizer, state.group(f"optimizer/{index}"))
    own = state.group(f"local/{collective.rank}")
    for optimizer in optimizers if own else ():
        _assign(optimizer, own[: len(optimizer.variables)])
        own = own[len(optimizer.variables) :]
    # The ranks of one worker share its batch.
    workers, before = collective.world_size // job.config.gpus_per_worker, state.facts["num_workers"]
    if job.config.scale_learning_rate and before != workers:
        for optimizer in rated_optimizers(model):
            rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
            optimizer.learning_rate = rate * workers / before


def _assign(optimizer: keras.optimizers.Optimizer, values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(optimizer.variables, values, strict=False):
        variable.assign(value)


def _updated(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> list[int]:
    """Returns the places among the model's weights of those that an optimizer updates; none before its first step."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    places = {id(variable): place for place, variable in enumerate(model.weights)}
    return [places[id(variable)] for variable in getattr(inner, "_trainable_variables", ()) if id(variable) in places]


def _values(variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _random_numbers(model: keras.Model) -> np.ndarray:
    """Returns where a model's generators are, int64, after whether there is one that they share, and where that is."""
    shared = shared_generator()
    states = [np.zeros(2) if shared is None else shared, *random_generators(model)]
    numbers = [np.asarray(keras.ops.convert_to_numpy(state)).astype(np.int64) for state in states]
    return np.concatenate([[np.int64(shared is not None)], *numbers])


def _restore_random_numbers(model: keras.Model, numbers: np.ndarray) -> None:
    generators = random_generators(model)
    if numbers[0]:
        generators = [shared_generator(made=True), *generators]
        states = numbers[1:].reshape(-1, 2)
    else:
        states = numbers[3:].reshape(-1, 2)
    for variable, state in zip(generators, states, strict=False):
        variable.assign(state.astype(variable.dtype))
