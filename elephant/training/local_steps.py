"""Local SGD: ranks train alone for some steps, and then average what they have learnt.

Each rank takes its steps with its own optimizer, and every k steps, or once an
epoch, all take the average of their weights, weighted by the rows each has used since
the last time (McMahan et al. 2017, algorithm 1; Stich 2019, algorithm 1). Fewer
exchanges make a slow network bearable. What it gives up: N ranks no longer do what one process
does on larger batches; the longer they are apart, the more the average differs from it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elephant.collective.communicator import Collective
from elephant.collective.fusion import FusedBuffer
from elephant.compression import reduction_for
from elephant.modeling.gradient_averager import StopSignal
from elephant.training.shares import StepShare


class WeightAveraging(keras.callbacks.Callback):
    """Averages the ranks' trainable weights every few steps and at the end of each epoch.

    Momenta and other state of the optimizers stay each rank's own. What travels is how far the weights
    have moved since the last average, so that it can be compressed as gradients can.

    Args:
        collective: Connects the ranks.
        share: Tells this rank's part of the rows.
        every: Steps between two averages; None means an epoch.
        compression: How what crosses hosts is encoded; see `elephant.compression`.
        stop: Travels with the weights.
    """

    def __init__(
        self,
        collective: Collective,
        share: StepShare,
        *,
        every: int | None,
        compression: str | None,
        stop: StopSignal,
    ) -> None:
        super().__init__()
        self._collective = collective
        self._share = share
        self._every = every
        self._compression = compression if collective.crosses_hosts else None
        self._stop = stop
        self._averaged_at = self._step = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        variables = self.model.trainable_variables
        self._agreed = _values(variables)
        self._buffer = FusedBuffer([*((value.shape, value.dtype) for value in self._agreed), ((1,), "float64")])
        self._reduction = reduction_for(self._compression, self._buffer.float32_slices)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._averaged_at = self._step = 0
        self._before_idling: list[np.ndarray] | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._share.is_idle and self._before_idling is None:
            # Stand-in rows are trained on from here on; what they do to the weights is not to count.
            self._before_idling = _values(self.model.trainable_variables)
        elif not self._share.is_idle and self._before_idling is not None:
            for variable, value in zip(self.model.trainable_variables, self._before_idling, strict=True):
                variable.assign(value)
            self._before_idling = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = batch + 1
        if self._every is not None and self._step % self._every == 0 and self._step < self._share.plan.steps:
            self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._average()

    def _average(self) -> None:
        """Gives every rank the weights that all have agreed on before, plus the average move since then."""
        variables = self.model.trainable_variables
        learnt = self._before_idling or _values(variables)
        moves = [value - agreed for value, agreed in zip(learnt, self._agreed, strict=True)]
        self._buffer.pack([*moves, np.zeros(1)], self._share.since(self._averaged_at))
        flag = self._buffer.unpack()[-1]
        flag[0] = float(self._stop.requested)
        self._buffer.allreduce(self._collective, lambda flat: self._reduction.reduce_(flat, self._collective))
        self._stop.agreed = self._stop.agreed or bool(flag[0] > 0)
        for variable, agreed, move in zip(variables, self._agreed, self._buffer.unpack(), strict=False):
            agreed += move
            variable.assign(agreed)
        self._averaged_at, self._before_idling = self._step, None


def _values(variables: list[keras.Variable]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
