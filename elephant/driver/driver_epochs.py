"""Epochs of an asynchronous fit, which are made of its workers', and the states from which it can go on."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from elephant.backends.keras_private import compiled_metrics
from elephant.checkpoint.manager import CheckpointSink
from elephant.checkpoint.state import FitState, identity_of, is_saved, joined, named
from elephant.checkpoint.table_states import remove_files
from elephant.data.schema import DataSchema
from elephant.driver.coordinator_policy import steps_of_epoch
from elephant.driver.driver_callbacks import DriverCallbacks
from elephant.driver.server_model import ServerModel, has_same_batches, positions_of
from elephant.modeling.layers.sharded_embedding import rows_as_zeros
from elephant.modeling.variable_paths import StateReader, paths_in_order
from elephant.modeling.variables import assign_flat, constant_rate, metric_variables, on_cpu
from elephant.monitor.events import EpochEnded, EpochPart, Event, Started, StateSaved, StepEnded
from elephant.parameter_server.tables import LEFT, WRITTEN, TablesWanted
from elephant.rank.checkpoints import states_of
from elephant.rank.input.tensors import blank_batch
from elephant.rank.job import TrainingJob, as_numbers
from elephant.rank.metrics.metric_sums import updated_results

if TYPE_CHECKING:
    from elephant.driver.gossip.directory import GossipDirectory
    from elephant.parameter_server.control_client import ControlClient, ServerState

logger = logging.getLogger(__name__)
# Where servers had nothing new for a state.
_ASK_AGAIN_S = 2.0
RowShapes = Mapping[str, Sequence[int]]


class EpochSummaries:
    """Adds up what the metrics of all workers have summed up, so that an epoch has one number for each metric.

    A worker that is run again may report an epoch once more: the report that is of
    more steps stays, and of two equal ones the later. An epoch that is complete does not change any more.

    Args:
        model: A compiled model whose metrics may be used, such as the driver's copy.
        num_workers: Workers that report every epoch; those without rows report empty ones.
        first_epoch: The epoch that the fit begins with, from zero.

    Attributes:
        lost: Epochs of which no worker has said numbers: each was lost between its last step and its report.
    """

    def __init__(self, model: keras.Model, schema: DataSchema, num_workers: int, first_epoch: int = 0) -> None:
        self._model = model
        self._schema = schema
        self._num_workers = num_workers
        self._parts: dict[int, dict[int, EpochPart]] = {}
        self._complete = set(range(first_epoch))
        self.lost: set[int] = set()
        # Of the numbers that an epoch has.
        self._names: list[str] = []

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
        if trained:
            self._names = list(logs)
        elif any(map(_has_lost, parts)):
            self.lost.add(parts[0].epoch)
            logs = dict.fromkeys(self._names or self._names_of(parts), math.nan)
        if self._results([part for part in parts if part.val_rows], 1, row_shapes):
            validated = as_numbers(self._model.get_metrics_result())
            logs |= {f"val_{name}": validated[name] for name in sorted(validated)}
        return logs

    def _names_of(self, parts: Sequence[EpochPart]) -> list[str]:
        """Returns the names of what the driver's copy of the model measures."""
        row_shapes = next(part.row_shapes for part in parts if _has_lost(part))
        try_batch(self._model, self._schema, row_shapes)
        compiled = compiled_metrics(self._model)
        return ["loss"] if compiled is None or not compiled.built else sorted(self._model.get_metrics_result())

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
        compiled = compiled_metrics(self._model)
        known = sum(int(np.prod(variable.shape)) for variable in metric_variables(self._model))
        return known == num_values and (compiled is None or compiled.built)


def try_batch(model: keras.Model, schema: DataSchema, row_shapes: RowShapes) -> None:
    """Has a model see a batch, which makes its metrics, if it can."""
    try:
        with rows_as_zeros(model):
            model.test_on_batch(*blank_batch(schema, row_shapes))
    except Exception as error:
        logger.info("the driver's copy of the model cannot take a batch: %s", error)


def _has_lost(part: EpochPart) -> bool:
    """Returns whether the numbers of a worker with rows are lost with an attempt that had trained the epoch to its end.

    The next one has no more steps to take in it, and says so.
    """
    return bool(part.row_shapes) and not part.steps and not part.stopped


def _average(parts: Sequence[EpochPart], name: str) -> float | None:
    """Returns the average of what a train_step of the model's own logged in each worker's last step."""
    known = [(part.rows, part.logs[name]) for part in parts if np.ndim(part.logs.get(name, [])) == 0]
    total = sum(rows for rows, _ in known)
    return float(sum(rows / total * value for rows, value in known)) if total else None


class DriverEpochs:
    """Makes the fit's epochs of those of its workers, and runs the user's callbacks on them.

    Args:
        job: What the workers do; its callbacks are the user's own objects.
        servers: They have the weights, and tell workers of rates and of the end; without servers, who knows the
            workers does.
        checkpoint_writer: Writes checkpoints; None makes none.
        keep_now: Returns what the servers have, wherever workers are, or None where that is yet to come; None asks the
            servers.
        show: Shown each checkpoint that users hear of; None shows none.

    Attributes:
        steps: Batches that workers have reported.
        wait_s: Seconds of these in which a worker waited for a server.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: ServerModel,
        servers: ControlClient | GossipDirectory,
        checkpoint_writer: CheckpointSink | None = None,
        keep_now: Callable[[], ServerState | None] | None = None,
        show: Callable[[Event], object] | None = None,
    ) -> None:
        self._job = job
        self._show = show
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
            folder_of=job.folder_of,
        )
        self._asked_to_stop = False
        self._state_reader = StateReader()
        self._keep_now = keep_now or self._state_of_servers
        # Those that have a path are nowhere while workers change them.
        self._tables_of_model = self._tables("while-it-trains", LEFT)
        self._num_states = 0
        self._done = job.first_epoch
        self._epoch_steps: dict[int, int] = {}
        # Of the last state: when it was made, and where workers were; and whether any has trained since.
        self._kept_at = time.monotonic()
        self._kept_positions = model.positions()
        self._has_moved = self._is_wanted = False
        self._ask_at = 0.0
        self.steps = 0
        self.wait_s = 0.0

    def _refresh(self, model: keras.Model) -> None:
        self._model.take(self._servers.fetch(self._tables_of_model))

    def _tables(self, state: str, action: str) -> TablesWanted:
        return TablesWanted(places=self._model.table_places.of(state), action=action)

    def _state_of_servers(self) -> ServerState:
        """Returns the state of the servers, who write tables that have a path for it."""
        self._num_states += 1
        return self._servers.keep(self._tables(str(self._num_states), WRITTEN))

    @on_cpu()
    def begin(self) -> None:
        """Tells the callbacks that training begins."""
        self._callbacks.begin()
        rate = constant_rate(self._model.model)
        if self._job.state is not None and not self._job.config.pushes_gradients and rate is not None:
            # Workers have optimizers of their own, as they were compiled.
            self._servers.set_rate(rate)
        self._open(self._job.first_epoch)

    @on_cpu()
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
        self._done = part.epoch + 1
        is_due = self._is_wanted or is_saved(self._done, self._job.config, stopped=self.stopped)
        if self._checkpoint_writer is not None and is_due:
            self._keep(self._checkpoint_writer, self._state_of_servers())
        self._open(part.epoch + 1)
        return [EpochEnded(rank=0, epoch=part.epoch, logs=logs, is_lost=part.epoch in self._summaries.lost)]

    def _open(self, epoch: int) -> None:
        """Lets workers that train in rounds begin an epoch: what callbacks have set before holds for all of it."""
        if self._job.config.trains_in_rounds and not self.stopped:
            self._servers.open_epochs(epoch + 1)

    def note(self, event: Started | StepEnded) -> None:
        """Takes a worker's start, or the news that it has trained."""
        if isinstance(event, Started):
            rows, config = event.training_rows, self._job.config
            self._epoch_steps[event.rank] = steps_of_epoch(
                rows, config.rank_batch_size, config.steps_per_epoch, self._job.most_steps
            )
        else:
            self._has_moved = True

    def keep_up(self, *, is_wanted: bool = False) -> None:
        """Has a state within the epoch kept, where the last one is old enough, and workers have trained since.

        Args:
            is_wanted: Whether somebody wants one, however old the last one is; it stays so until there is one.

        Raises:
            ServerFailedError: A server has given the fit up.
            NetworkError: A server cannot be reached.
        """
        writer = self._checkpoint_writer
        self._is_wanted = self._is_wanted or is_wanted
        if writer is None or not self._has_moved or self.stopped or not self._is_time:
            return
        # Before all that have pushed have begun, nobody knows what their pushes come to.
        server_state = self._keep_now() if self._kept_positions.keys() <= self._epoch_steps.keys() else None
        if server_state is None:
            return
        self._has_moved = False
        positions = positions_of(server_state.ledgers)
        step = steps_beyond(positions, self._epoch_steps, self._done, num_workers=self._job.config.num_ranks)
        told = {(part.rank, part.epoch) for part in self._summaries.pending}
        if step and positions != self._kept_positions and not self._lacks_part(positions, told):
            self._keep(writer, server_state, step)
        else:
            self._forget_state()
            # To ask means to copy the weights.
            self._ask_at = time.monotonic() + min(self._job.config.checkpoint_seconds or math.inf, _ASK_AGAIN_S)

    def _forget_state(self) -> None:
        """Removes the tables that were written for the last state, which nobody keeps."""
        places = self._model.table_places
        with contextlib.suppress(Exception):
            remove_files([places.name_of(str(self._num_states))], places.urls)

    def _lacks_part(self, positions: Mapping[int, int], told: AbstractSet[tuple[int, int]]) -> bool:
        """Returns whether a worker is within an epoch, and the news of its epoch before has not been heard yet.

        A worker that goes on at the begin of an epoch tells of the one before; within one it does not.
        """
        for partition, position in positions.items():
            epoch, within = divmod(position, max(self._epoch_steps.get(partition, 0), 1))
            ended = range(self._done, epoch if within else epoch - 1)
            if any((partition, one) not in told for one in ended):
                return True
        return False

    @property
    def _is_time(self) -> bool:
        """True if the last state is old enough, or one is wanted."""
        config = self._job.config
        if config.trains_in_rounds and config.asynchronous.parameter_servers > 1:
            # They are in the same round at the end of an epoch alone.
            return False
        seconds = config.checkpoint_seconds
        if time.monotonic() < self._ask_at:
            return False
        return self._is_wanted or (seconds is not None and time.monotonic() - self._kept_at >= seconds)

    @on_cpu()
    def _keep(self, checkpoint_writer: CheckpointSink, server_state: ServerState, step: int = 0) -> None:
        state = self._state(server_state, step)
        if checkpoint_writer.keep(state) and self._show is not None:
            # Of the state itself nobody wants to see anything.
            self._show(StateSaved(rank=0, epochs=state.epochs, step=state.step, history={}, facts={}, names=[]))
        self._kept_at, self._kept_positions = time.monotonic(), positions_of(server_state.ledgers)
        self._is_wanted = False

    def _state(self, server_state: ServerState, step: int) -> FitState:
        """Returns the state from which the fit can go on; workers that were faster are further on, and stay so."""
        done, fetched = self._done, server_state.fetched
        self._model.take(fetched)
        states, of_callbacks = states_of(self._job.callbacks)
        model, pending = self._model.model, []
        of_model, frozen = self._state_reader.read(model)
        arrays = {**of_model, **of_callbacks}
        for index, part in enumerate(self._summaries.pending):
            pending.append({one.name: getattr(part, one.name) for one in fields(part) if one.name != "arrays"})
            arrays |= named(f"part/{index}", [np.asarray(array) for array in part.arrays])
        facts = {
            "fit": identity_of(self._job.config),
            "rows": self._model.rows.to_json(),
            "stopped": self.stopped,
            "variables": paths_in_order(model),
            "optimizer_names": self._model.optimizer_names,
            "callbacks": states,
            "begun": self._callbacks.has_begun(done),
            "ledgers": [{str(partition): entry for partition, entry in one.items()} for one in server_state.ledgers],
            "parts": pending,
            **({"frozen": frozen} if frozen else {}),
            **self._model.table_places.facts_of(str(self._num_states), are_finite=server_state.are_finite),
        }
        return FitState(epochs=done, step=step, history=self._history, arrays=arrays, facts=facts)

    def stop(self) -> None:
        """Has all workers stop: one of them has asked for it."""
        self._asked_to_stop = True
        self._servers.stop()

    @property
    def stopped(self) -> bool:
        """True if workers were told to stop before the last epoch's end."""
        return self._asked_to_stop or self._callbacks.stopped

    def remind(self) -> None:
        """Tells servers that have come back what callbacks have asked for."""
        self._servers.remind()

    @on_cpu()
    def end(self) -> None:
        """Gives the model what the servers keep, and tells the callbacks that training has ended."""
        self._tables_of_model = self._tables("result", WRITTEN)
        self._callbacks.end()

    def close(self) -> None:
        """Lets go of what callbacks hold, whether training has ended well or not."""
        self._callbacks.close()


def steps_beyond(positions: Mapping[int, int], epoch_steps: Mapping[int, int], done: int, *, num_workers: int) -> int:
    """Returns the steps of all workers that are beyond so many epochs.

    None count where all have trained one more to its end: they say so in a moment, with what it came to.

    Args:
        positions: By partition, the last step over all epochs; none for those that have not begun.
        epoch_steps: By partition, the steps of an epoch, of workers that have begun.

    >>> steps_beyond({0: 7, 1: 3}, {0: 2, 1: 3}, 1, num_workers=2), steps_beyond({0: 4}, {0: 2, 1: 3}, 1, num_workers=2)
    (5, 2)
    >>> steps_beyond({0: 4, 1: 6}, {0: 2, 1: 3}, 1, num_workers=2)
    0
    """
    beyond = {one: max(positions.get(one, 0) - done * steps, 0) for one, steps in epoch_steps.items()}
    if len(beyond) == num_workers and all(beyond[one] >= steps for one, steps in epoch_steps.items()):
        return 0
    return sum(beyond.values())


def pending_parts(job: TrainingJob) -> list[EpochPart]:
    """Returns the parts of unfinished epochs that workers had reported before a fit was interrupted."""
    state = job.state
    if state is None or not has_same_batches(state, job.config):
        return []
    return [
        EpochPart(**about, arrays=tuple(state.group(f"part/{index}")))
        for index, about in enumerate(state.facts["parts"])
    ]
