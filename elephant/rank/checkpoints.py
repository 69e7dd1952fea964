"""Checkpoints made in a training process: model, optimizer, random state, and states of callbacks.

Of Keras' own callbacks, and of `elephant.LearningRateWarmup`, it is known what that is. One of the user's may
have a method ``get_state()``, which returns a dictionary of JSON values, numpy arrays and lists of arrays,
and a method ``set_state(state)``, which is called after its ``on_train_begin``. Others begin anew.

All ranks have the same weights then, and the same optimizer state where they exchange gradients: rank 0's is
kept. What is each rank's own is kept by rank: the random generators of its model, and, where ranks train
alone between two averages, the state of its optimizer; within an epoch also the sums of its metrics, what its layers
have learned without a gradient, and which rows it has; and what compression has left over. What callbacks remember is
rank 0's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import optimized_variables
from elephant.checkpoint.manager import Checkpoint
from elephant.checkpoint.other_ranks import rows_of_all
from elephant.checkpoint.state import FitState, identity_of, is_saved, joined, named, require_same_optimizers
from elephant.collective.communicator import Communicator
from elephant.data.schema import RowSpec
from elephant.errors import ConfigurationError, PreemptedError, RowsMovedError
from elephant.modeling.variable_paths import (
    MODEL,
    SCALE,
    StateReader,
    assign_state,
    generator_paths,
    optimizer_prefix,
    paths_in_order,
    read_by_path,
    read_generators,
    state_paths,
    variable_paths,
)
from elephant.modeling.variables import (
    OF_CHECKPOINT,
    build_variables,
    metric_variables,
    moving_statistics,
    optimizer_names,
    optimizers_of,
    rated_optimizers,
    read_values,
    shared_generator,
)
from elephant.net.buffers import portable
from elephant.rank.callbacks.checkpoint_moments import CheckpointMoments
from elephant.rank.callbacks.divided_optimizer import DividedOptimizer
from elephant.rank.callbacks.divided_tables import FitTables
from elephant.rank.callbacks.end_notice import EndNotice
from elephant.rank.callbacks.rank_callbacks import IdleSteps, any_rank
from elephant.rank.callbacks.shared_state import assign, read
from elephant.rank.job import Reporter, TrainingJob, as_numbers
from elephant.training.warmup import LearningRateWarmup

logger = logging.getLogger(__name__)
# The attributes that change as training goes on. What the user chose, such as patience, is not among them.
_REMEMBERED: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving"),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    LearningRateWarmup: ("_targets", "_start"),
}
# A rank that was asked to end has a short time.
_RECEIPT_S = 10.0
States = list[dict[str, Any]]

Arrays = dict[str, np.ndarray]
# Of the generator that layers without one of their own draw from, in place of a path.
_SHARED = "shared"


def states_of(callbacks: Sequence[keras.callbacks.Callback]) -> tuple[States, dict[str, np.ndarray]]:
    """Returns the states of callbacks.

    Returns:
        One JSON value per callback, and the arrays that these name.

    Raises:
        TypeError: A ``get_state`` returned something that a checkpoint does not hold.
    """
    arrays: dict[str, np.ndarray] = {}
    states = []
    for index, callback in enumerate(callbacks):

        def keep(value: Any, place: str = f"callback/{index}") -> Any:
            return _saved(value, place, arrays)

        values = {name: keep(value) for name, value in _state_of(callback).items()}
        states.append({"class": type(callback).__name__, "values": values})
    return states, arrays


def restore_states(
    pairs: Iterable[tuple[keras.callbacks.Callback, Mapping[str, Any]]], arrays: Mapping[str, np.ndarray]
) -> None:
    """Gives callbacks back what they remembered; those that are others than they were begin anew.

    Args:
        pairs: Callbacks, after their ``on_train_begin``, and what `states_of` returned for each.
        arrays: As `states_of` returned them.
    """
    for callback, state in pairs:
        name = type(callback).__name__
        if state["class"] != name:
            logger.warning("the checkpoint has a %s where a %s is now, which begins anew", state["class"], name)
            continue
        values = {key: _given_back(value, arrays) for key, value in state["values"].items()}
        setter = _method(callback, "set_state")
        if setter is not None:
            if values:
                setter(values)
            continue
        for key, value in values.items():
            setattr(callback, key, value)


def continue_files(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Has callbacks go on in the files of the fit that is resumed, where they would begin them anew."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def _state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    getter = _method(callback, "get_state")
    if getter is not None:
        return dict(getter() or {})
    names = next((names for kind, names in _REMEMBERED.items() if isinstance(callback, kind)), ())
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _method(callback: keras.callbacks.Callback, name: str) -> Callable[..., Any] | None:
    found = getattr(callback, name, None)
    return found if callable(found) else None


def _saved(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """Returns a value as JSON holds it; arrays are put aside, and named."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, np.generic) or keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        value = np.asarray(keras.ops.convert_to_numpy(value))
        if value.ndim == 0:
            return {"value": value.item()}
    if isinstance(value, np.ndarray):
        name = f"{place}/{len(arrays)}"
        arrays[name] = np.array(value)
        return {"array": name}
    if isinstance(value, (list, tuple)):
        return {"list": [_saved(item, place, arrays) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _saved(item, place, arrays) for key, item in value.items()}}
    raise TypeError(
        f"get_state: expected numbers, text, numpy arrays, or lists and dictionaries of these. Received: {value!r}."
    )


def _given_back(kept: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    if "array" in kept:
        return np.array(arrays[kept["array"]])
    if "list" in kept:
        return [_given_back(item, arrays) for item in kept["list"]]
    if "dict" in kept:
        return {key: _given_back(item, arrays) for key, item in kept["dict"].items()}
    return kept["value"]


class Compressing(Protocol):
    """Holder of what compression has left over."""

    @property
    def memory(self) -> list[np.ndarray]:
        """Arrays of it, to read."""

    def remember(self, memory: Sequence[np.ndarray]) -> None:
        """Gives it arrays that it had; before it compresses."""


@dataclass(frozen=True, kw_only=True)
class StateWithin:
    """Parts of a state that are a rank's own within an epoch, besides its model's variables.

    Args:
        moments: When there is to be a state.
        idle: Undoes what steps without rows did; None where this rank has rows in all steps.
        notice: That this process is to end.
        compressing: None where nothing is compressed.
        rows: Digest of the rank's rows, int64 of shape (2,); see `elephant.rank.input.feed.BatchFeed`.
    """

    moments: CheckpointMoments
    idle: IdleSteps | None
    notice: EndNotice
    compressing: Compressing | None
    rows: np.ndarray


class CheckpointCallback(keras.callbacks.Callback):
    """Has the state of the fit kept every few epochs or seconds, and gives it back when a fit goes on; the last of all.

    Args:
        reporter: Told of every state by rank 0.
        within: What is kept within an epoch; None keeps states of ends of epochs alone.
        tables: The model's; None where it has none.
        divided: The optimizer, of whose state ranks have parts; None where each has all.
    """

    def __init__(
        self,
        job: TrainingJob,
        communicator: Communicator,
        reporter: Reporter,
        *,
        own: Sequence[keras.callbacks.Callback],
        rows: RowSpec,
        within: StateWithin | None = None,
        tables: FitTables | None = None,
        divided: DividedOptimizer | None = None,
    ) -> None:
        super().__init__()
        self._tables = tables
        self._job = job
        self._within = within
        self._divided = divided
        self._communicator = communicator
        self._reporter = reporter
        self._own = {id(callback) for callback in own}
        self._rows = rows
        self._history: dict[str, list[Any]] = {} if job.state is None else joined(job.state.history, {})
        self._generator = None if job.state is None else job.state.arrays.get(f"generator/{communicator.rank}")
        self._epoch = job.first_epoch
        self._state_reader = StateReader()
        if job.state is not None and within is not None and within.compressing is not None:
            within.compressing.remember(job.state.group(f"compressed/{communicator.rank}"))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._job.state is not None and not self._job.state.step:
            self._give_back(self._job.state)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, state = epoch, self._job.state
        if state is not None and (epoch, 0) < self._job.first:
            # The epoch had begun for those who remember, and Keras has set the sums of metrics back.
            self._give_back(state)
            for variable, value in zip(
                metric_variables(self.model), state.group(f"metric/{self._communicator.rank}"), strict=True
            ):
                variable.assign(value)
        if self._within is not None:
            self._within.moments.begin_epoch()

    def _give_back(self, state: FitState) -> None:
        pairs = zip(self._job.callbacks, state.facts["callbacks"], strict=False)
        restore_states([pair for pair in pairs if id(pair[0]) in self._own], state.arrays)
        # Callbacks have begun as if training did: some change the learning rate then.
        restore_optimizers(self.model, state, self._job, self._communicator)
        for variable, value in zip(self._job.outside, state.group("outside"), strict=False):
            assign(variable, value)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Not before: on PyTorch, what reads the batches draws from it when it begins.
        if self._generator is not None:
            current().restore_generator(self._generator)
            self._generator = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        within, done = self._within, batch + 1
        # Not ``self.model``, which on JAX puts the state of every step back into the variables.
        if within is None or self._model.stop_training:
            return
        is_free = self._communicator.rank != 0 or self._reporter.is_free
        if within.moments.is_due(done, is_free=is_free, **self._wishes(within)):
            if within.idle is not None:
                within.idle.put_back()
            self._keep(self._epoch, done, stopped=False)
            self._leave(within)

    def _wishes(self, within: StateWithin) -> dict[str, bool]:
        leaves = within.notice.is_given
        return {"leaves": leaves, "is_wanted": self._communicator.rank == 0 and self._reporter.state_wanted}

    def _leave(self, within: StateWithin) -> None:
        """Raises PreemptedError on a rank that was asked to end, when the state of all is with the driver."""
        if not within.moments.someone_leaves:
            return
        is_missing = self._communicator.rank == 0 and not self._reporter.await_receipt(_RECEIPT_S)
        is_missing = any_rank(is_missing, self._communicator)
        if within.notice.is_given and is_missing:
            # The signal has its own effect again, and the loss of this process is one as any other.
            signal.raise_signal(signal.SIGTERM)
        if within.notice.is_given:
            raise PreemptedError(
                f"rank {self._communicator.rank} was asked to end (SIGTERM), by the cluster manager or an "
                "administrator. The driver has the fit's state of this step."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        done = epoch + 1
        self._history = joined(self._history, {name: [value] for name, value in as_numbers(logs).items()})
        stopped, within = bool(self.model.stop_training), self._within
        if within is not None:
            is_due = within.moments.is_due_at_end(**self._wishes(within))
        else:
            is_due = any_rank(self._communicator.rank == 0 and self._reporter.state_wanted, self._communicator)
        is_last = stopped or done >= self._job.config.epochs
        # For the driver's memory alone, one of each short epoch would be too many.
        by_epochs = within is None or not self._job.config.forms_generations or self._job.config.checkpoint_path
        if is_due or ((by_epochs or is_last) and is_saved(done, self._job.config, stopped=stopped)):
            self._keep(done, 0, stopped=stopped)
        if within is not None and done < self._job.config.epochs and not stopped:
            self._leave(within)

    def _keep(self, epochs: int, step: int, *, stopped: bool) -> None:
        """Has the state after so many steps of an epoch kept; all ranks call it."""
        began = time.monotonic()
        writing: contextlib.AbstractContextManager[dict[str, Any]]
        writing = contextlib.nullcontext({}) if self._tables is None else self._tables.written(f"{epochs}-{step}")
        with writing as of_tables:
            own = own_arrays(self.model, self._job, self._communicator, self._within, is_within=step > 0)
            if self._divided is not None:
                own |= self._divided.gather(self.model)
            if self._communicator.rank == 0:
                self._reporter.state_wanted = False
                self._reporter.keep(self._state(epochs, step, own, stopped, of_tables))
        if self._within is not None:
            self._within.moments.end_turn(began)

    def _state(self, epochs: int, step: int, own: Arrays, stopped: bool, of_tables: Mapping[str, Any]) -> FitState:
        states, of_callbacks = states_of(self._job.callbacks)
        of_model, frozen = self._state_reader.read(self.model)
        arrays = {**of_model, **own, **of_callbacks}
        arrays |= named("outside", [read(variable) for variable in self._job.outside])
        facts = {
            "fit": identity_of(self._job.config),
            "rows": self._rows.to_json(),
            "num_workers": self._job.config.batches_of(self._communicator.world_size),
            "stopped": stopped,
            "variables": paths_in_order(self.model) if self._divided is None else self._divided.paths,
            "optimizer_names": optimizer_names(self.model),
            "callbacks": states,
            "optimizers": [_updated(self.model, optimizer) for optimizer in optimizers_of(self.model)[1:]],
            **({"frozen": frozen} if frozen else {}),
            **of_tables,
        }
        return FitState(epochs=epochs, step=step, history=self._history, arrays=arrays, facts=facts)


def own_arrays(
    model: keras.Model,
    job: TrainingJob,
    communicator: Communicator,
    within: StateWithin | None = None,
    *,
    is_within: bool = False,
) -> Arrays:
    """Gathers each rank's own arrays, by rank; all ranks call it, and rank 0 gets the whole.

    Args:
        within: What they have of their own besides the model.
        is_within: Whether the state is one within an epoch.
    """
    arrays: Arrays = {}
    names = [*generator_paths(model), _SHARED]
    drawn = communicator.allgather(read_generators(_generators(model).values()))
    # Of a model in stages the first ranks are the replicas; others have the generators of theirs.
    for rank, numbers in enumerate(drawn[: communicator.world_size // job.config.num_stages]):
        # Not every rank has drawn from a shared one, which comes last.
        arrays |= {f"random/{rank}/{name}": row for name, row in zip(names, numbers, strict=False)}
    for rank, of_framework in enumerate(communicator.allgather(current().generator_state())):
        if len(of_framework):
            arrays[f"generator/{rank}"] = np.array(of_framework)
    own: dict[str, Arrays] = {}
    if not job.config.averages_gradients and communicator.world_size > 1:
        own["local"] = read_by_path(_optimizer_paths(model))
    if within is not None and within.compressing is not None:
        own["compressed"] = {str(place): np.array(one) for place, one in enumerate(within.compressing.memory)}
    if within is not None and is_within:
        own["moving"] = read_by_path(_moving_paths(model))
        own["metric"] = {str(place): one for place, one in enumerate(read_values(metric_variables(model)))}
        own["rows"] = {"0": within.rows}
    return arrays | _by_rank(own, communicator)


def _by_rank(own: Mapping[str, Arrays], communicator: Communicator) -> Arrays:
    """Returns on rank 0 the arrays of all ranks as kind/rank/name; on others nothing.

    Args:
        own: Arrays by name, by kind: the same kinds on all ranks.
    """
    if not own:
        return {}
    named_arrays = {(kind, name): array for kind, arrays in own.items() for name, array in arrays.items()}
    if communicator.rank:
        names = np.frombuffer(json.dumps([*named_arrays]).encode(), np.uint8)
        communicator.send([names, *map(portable, named_arrays.values())], dst=0)
        return {}
    found = {f"{kind}/0/{name}": array for (kind, name), array in named_arrays.items()}
    for rank in range(1, communicator.world_size):
        names, *arrays = communicator.recv(rank)
        for (kind, name), array in zip(json.loads(names.tobytes()), arrays, strict=True):
            found[f"{kind}/{rank}/{name}"] = np.array(array)
    return found


def _moving_paths(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns by path the variables that layers learn without a gradient: each rank has its own within an epoch."""
    own = {id(variable) for variable in moving_statistics(model)}
    return {path: variable for path, variable in state_paths(model).items() if id(variable) in own}


def restore(model: keras.Model, job: TrainingJob, communicator: Communicator) -> None:
    """Gives a rank's model what it had at the end of the epoch that a fit goes on from; nothing where it begins.

    Raises:
        ConfigurationError: The state is that of another model.
    """
    if job.state is None:
        return
    require_same_optimizers(job.state.facts, optimizer_names(model))
    continue_files(job.callbacks)
    updated = job.state.facts["optimizers"]
    _build_optimizers(model, updated)
    state = by_path(job.state, model, communicator.rank)
    # What had not taken a step has nothing that goes on.
    begun_anew = tuple(optimizer_prefix(number) for number, places in enumerate(updated, 1) if not places)
    moving = {path: state.arrays.get(f"moving/{communicator.rank}/{path}") for path in _moving_paths(model)}
    arrays = {**state.arrays, **{path: value for path, value in moving.items() if value is not None}}
    assign_state(state_paths(model), arrays, remedy=OF_CHECKPOINT, partly=begun_anew)
    restore_optimizers(model, state, job, communicator)
    # A rank that there was not before has been seeded as any new one is.
    prefix = f"random/{communicator.rank}/"
    if prefix + _SHARED in state.arrays:
        shared_generator(made=True)
    for name, variable in _generators(model).items():
        if (numbers := state.arrays.get(prefix + name)) is not None:
            variable.assign(numbers.astype(variable.dtype))


def require_same_rows(job: TrainingJob, digest: np.ndarray, communicator: Communicator) -> None:
    """Raises RowsMovedError where a fit that is to go on within an epoch has other rows than it had on this rank.

    Some rows would be trained on twice in the epoch, and others not at all. Those of an elastic fit may be on other
    ranks now.
    """
    if job.state is None or not job.state.step:
        return
    rank = communicator.rank
    if job.config.elastic is not None:
        _require_same_rows_of_all(job.state, digest, communicator)
        return
    kept = job.state.arrays.get(f"rows/{rank}/0")
    if kept is None or not np.array_equal(kept, digest):
        raise RowsMovedError(
            f"expected the rows that rank {rank} had in the first {job.state.step} steps of the epoch"
            + ("" if kept is None else f", which were {kept[0]:,}")
            + f". Received: others, which are {digest[0]:,}."
        )


def _require_same_rows_of_all(state: FitState, digest: np.ndarray, communicator: Communicator) -> None:
    kept, found = rows_of_all(state), digest.copy()
    if communicator.world_size > 1:
        communicator.allreduce_(found)
    if kept is None or not np.array_equal(kept, found):
        raise RowsMovedError(
            f"expected the rows that all ranks had in the first {state.step} steps of the epoch"
            + ("" if kept is None else f", which were {kept[0]:,}")
            + f". Received: others, which are {found[0]:,}."
        )


def require_same_sums(model: keras.Model, state: FitState, rank: int) -> None:
    """Raises RowsMovedError where the model's metrics are others than those whose sums a state within an epoch has."""
    kept = [array.shape for array in state.group(f"metric/{rank}")]
    own = [tuple(variable.shape) for variable in metric_variables(model)]
    if kept != own:
        raise RowsMovedError(
            f"expected the {len(kept)} sums of metrics that the fit had in the first {state.step} steps of the epoch. "
            f"Received: a model with {len(own)}, or with others."
        )


def assign_checkpoint(model: keras.Model, checkpoint: Checkpoint) -> None:
    """Gives a model of this process the weights of a checkpoint, and its optimizer what it had, for use without a fit.

    Args:
        model: Compiled as the one that was trained, or not compiled: then it gets the weights alone.

    Raises:
        ConfigurationError: The checkpoint is that of another model.
    """
    compiled = getattr(model, "optimizer", None) is not None
    build_variables(model, None)
    if compiled and "optimizers" in checkpoint.state.facts:
        require_same_optimizers(checkpoint.state.facts, optimizer_names(model))
        _build_optimizers(model, checkpoint.state.facts["optimizers"])
    state = by_path(checkpoint.state, model)
    result = dict(zip(state.variable_names, checkpoint.result, strict=True)) if checkpoint.finished else {}
    arrays = {**state.arrays, **result}
    assign_state(state_paths(model), arrays, remedy=OF_CHECKPOINT, partly=("optimizer",))


def restore_optimizers(model: keras.Model, state: FitState, job: TrainingJob, communicator: Communicator) -> None:
    """Gives a model's optimizers what they had, but for a rate that follows the number of workers."""
    arrays = by_path(state, model, communicator.rank).arrays
    for path, variable in _optimizer_paths(model).items():
        value = arrays.get(f"local/{communicator.rank}/{path}", arrays.get(path))
        if value is not None:
            variable.assign(value)
    workers, before = job.config.batches_per_step, state.facts["num_workers"]
    if job.config.scale_learning_rate and before != workers:
        for optimizer in rated_optimizers(model):
            rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
            optimizer.learning_rate = rate * workers / before


def by_path(state: FitState, model: keras.Model, rank: int = 0) -> FitState:
    """Returns a state by path; one of the first format, by place, with the paths of the model that goes on from it.

    Args:
        rank: Whose own arrays are wanted.

    Raises:
        ConfigurationError: A state of the first format is that of another model.
    """
    if "variables" in state.facts:
        return state
    paths, names = _optimizer_paths(model), paths_in_order(model)
    if len(names) != len(state.variables):
        raise ConfigurationError(
            f"model: expected the {len(state.variables)} variables that the checkpoint has. Received: {len(names)}, "
            f"with those of its optimizer. {OF_CHECKPOINT}"
        )
    by_place = {"model": names, "scale": [f"{SCALE}step_counter", f"{SCALE}dynamic_scale"]}
    by_place[f"local/{rank}"] = [f"local/{rank}/{path}" for path in paths]
    for number in range(1, len(optimizers_of(model))):
        prefix = optimizer_prefix(number)
        by_place[f"optimizer/{number - 1}"] = [path for path in paths if path.startswith(prefix)]
    # A flag for a shared generator came first, then its numbers, or zeros.
    flag, *numbers = state.arrays.get(f"random/{rank}", np.zeros(1, np.int64))
    rows = dict(zip([_SHARED, *generator_paths(model)], np.reshape(numbers, (-1, 2)), strict=False))
    arrays = {f"random/{rank}/{name}": row for name, row in rows.items() if flag or name != _SHARED}
    placed = {f"{kind}/{place}" for kind, known in by_place.items() for place in range(len(known))}
    arrays |= {name: array for name, array in state.arrays.items() if name not in placed}
    for kind, known in by_place.items():
        arrays |= dict(zip(known, state.group(kind), strict=False))
    return replace(state, arrays=arrays, facts={**state.facts, "variables": names})


def _optimizer_paths(model: keras.Model) -> dict[str, keras.Variable]:
    return {path: variable for path, variable in state_paths(model).items() if not path.startswith(MODEL)}


def _build_optimizers(model: keras.Model, updated: Sequence[Sequence[str | int]]) -> None:
    """Has the optimizers after the first one make their variables for the weights that they have updated.

    Args:
        updated: Paths; or, in the first format, places among the weights.
    """
    weights: dict[Any, keras.Variable] = {**variable_paths(model), **dict(enumerate(model.weights))}
    for optimizer, keys in zip(optimizers_of(model)[1:], updated, strict=False):
        if keys and not optimizer.built:
            optimizer.build([weights[key] for key in keys if key in weights])


def _updated(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Returns the paths of the weights that an optimizer updates; none before its first step."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    paths = {id(variable): path for path, variable in variable_paths(model).items()}
    return [paths[id(variable)] for variable in optimized_variables(inner) if id(variable) in paths]


def _generators(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states of the generators that a model draws from, by path, the shared one last."""
    shared = shared_generator()
    return generator_paths(model) | ({} if shared is None else {_SHARED: shared})


class StateSource(Protocol):
    """Source of the state; see `elephant.monitor.channel.ChannelClient`."""

    def fetch_state(self) -> FitState:
        """Asks the driver for it; returns it when all of it has come."""


def received_state(state_source: StateSource, communicator: Communicator) -> FitState:
    """Returns the state that all ranks go on from: rank 0 fetches it, and broadcasts it to the others; all call it.

    Raises:
        NetworkError: The driver or another rank is gone.
    """
    head, arrays = None, {}
    if communicator.rank == 0:
        state = state_source.fetch_state()
        arrays = {name: portable(array) for name, array in state.arrays.items()}
        forms = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
        head = (state.epochs, state.step, dict(state.history), dict(state.facts), forms)
    epochs, step, history, facts, forms = communicator.broadcast_object(head)
    # All in one, because each broadcast waits for all ranks; each where numbers of eight bytes may begin.
    words = [-(-math.prod(shape) * np.dtype(kind).itemsize // 8) for shape, kind in forms.values()]
    flat = np.zeros(sum(words), np.int64)
    parts = np.split(flat, np.cumsum(words)[:-1])
    received = {
        name: part.view(np.uint8)[: math.prod(shape) * np.dtype(kind).itemsize].view(kind).reshape(shape)
        for (name, (shape, kind)), part in zip(forms.items(), parts, strict=True)
    }
    for name, array in arrays.items():
        received[name][...] = array
    communicator.broadcast_(flat)
    return FitState(epochs=epochs, step=step, history=history, arrays=received, facts=facts)
