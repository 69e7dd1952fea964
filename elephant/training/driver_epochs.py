"""The epochs of an asynchronous fit as its driver sees them: one number over all workers, and the user's callbacks."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import keras
import numpy as np

from elephant.checkpoint.state import FitState, identity_of, is_kept, joined, named
from elephant.checkpoint.writer import Keeps
from elephant.monitor.events import EpochEnded, EpochPart
from elephant.training.callback_states import states_of
from elephant.training.driver_callbacks import DriverCallbacks
from elephant.training.epochs import EpochSummaries
from elephant.training.job import TrainingJob, as_numbers
from elephant.training.served_model import ServedModel

if TYPE_CHECKING:
    from elephant.parameter_server.control_client import Control


class DriverEpochs:
    """Makes the fit's epochs of those of its workers, and runs the user's callbacks on them.

    Args:
        job: What the workers do; its callbacks are the user's own objects.
        model: The driver's model, which the callbacks get.
        servers: Where the weights are.
        keeper: Writes checkpoints; None makes none.

    Attributes:
        steps: Batches that workers have reported.
        wait_s: Seconds of these in which a worker waited for a server.
    """

    def __init__(self, job: TrainingJob, model: ServedModel, servers: Control, keeper: Keeps | None = None) -> None:
        self._job = job
        self._model = model
        self._servers = servers
        self._keeper = keeper
        self._history = {} if job.state is None else joined(job.state.history, {})
        self._summaries = EpochSummaries(model.model, job.model_schema, job.config.num_workers, job.first_epoch)
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
        if self._keeper is not None and is_kept(part.epoch + 1, self._job.config, stopped=self.stopped):
            self._keeper.keep(self._state(part.epoch + 1))
        return [EpochEnded(rank=0, epoch=part.epoch, logs=logs)]

    def _state(self, done: int) -> FitState:
        """Returns what the fit needs to go on from here; workers that were faster are further on, and stay so."""
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
    """Returns what workers had reported, before a fit was interrupted, of epochs that others had not ended."""
    state = job.state
    if state is None or state.facts["fit"]["num_workers"] != job.config.num_workers:
        return []
    return [
        EpochPart(**about, arrays=tuple(state.group(f"part/{index}")))
        for index, about in enumerate(state.facts["parts"])
    ]
