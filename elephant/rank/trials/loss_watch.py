"""Watch on the losses while a fit goes on: further rows have their turn in a trial, in a small part of the time."""

from __future__ import annotations

import logging
import time
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import clear_losses
from elephant.modeling.variables import metric_variables
from elephant.rank.trials.loss_trial import LossTrial, refuse

logger = logging.getLogger(__name__)

# The watch may take this part of the time that the fit has taken so far, besides its first turn: in that, JAX compiles
# for so many rows what later turns call again.
_PART = 0.05
# The watch begins after the first epoch, or after as many short ones as have this together.
_ENOUGH_S = 1.0


class LossWatch(keras.callbacks.Callback):
    """Tries the losses on rows that no trial has had; rare ones may count otherwise, as those with a mask.

    Args:
        trial: Of this rank.
        allowed: Warns where it would raise.
    """

    def __init__(self, trial: LossTrial, *, allowed: bool) -> None:
        super().__init__()
        self._trial: LossTrial | None = trial
        self._allowed = allowed
        self._began = self._spent_s = 0.0
        self._is_compiled = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.monotonic()
        if self._trial is None or self._spent_s > _PART * (now - self._began):
            return
        found = self._tried(self._trial)
        self._spent_s += time.monotonic() - now if self._is_compiled else 0.0
        self._is_compiled = True
        if found or self._trial.has_tried_all:
            self._trial = None
        refuse(found, allowed=self._allowed)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._spent_s >= _ENOUGH_S:
            self._trial = None

    def _tried(self, trial: LossTrial) -> list[str]:
        # Asked for, so that Keras on JAX gives the model its weights back.
        model = self.model
        # Those of a step's graph are no numbers.
        clear_losses(model)
        # A loss that is computed counts in the trackers of outputs, and in those that a loss of one's own feeds.
        counted = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in metric_variables(model)]
        try:
            return trial.next()
        except Exception as error:
            logger.info("the loss is not watched any more: %s: %s", type(error).__name__, error)
            trial.end()
            return []
        finally:
            for variable, value in counted:
                variable.assign(value)
