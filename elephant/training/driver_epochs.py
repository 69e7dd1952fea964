"""The epochs of an asynchronous fit as its driver sees them: one number over all workers, and the user's callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from elephant.monitor.events import EpochEnded, EpochPart
from elephant.training.driver_callbacks import DriverCallbacks
from elephant.training.epochs import EpochSummaries
from elephant.training.job import TrainingJob
from elephant.training.served_model import ServedModel

if TYPE_CHECKING:
    from elephant.parameter_server.control import Control


class DriverEpochs:
    """Makes the fit's epochs of those of its workers, and runs the user's callbacks on them.

    Args:
        job: What the workers do; its callbacks are the user's own objects.
        model: The driver's model, which the callbacks get.
        servers: Where the weights are.

    Attributes:
        steps: Batches that workers have reported.
        wait_s: Seconds of these in which a worker waited for a server.
    """

    def __init__(self, job: TrainingJob, model: ServedModel, servers: Control) -> None:
        self._model = model
        self._servers = servers
        self._summaries = EpochSummaries(model.model, job.model_schema, job.config.num_workers)
        self._callbacks = DriverCallbacks(
            model.model,
            job.callbacks,
            epochs=job.config.epochs,
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
        return [] if logs is None else [EpochEnded(rank=0, epoch=part.epoch, logs=logs)]

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
