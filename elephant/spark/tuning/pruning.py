"""Pruning: what Optuna is told of a trial's epochs, and the end of a trial that it gives up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from elephant.checkpoint.retention import Objective
from elephant.errors import DataError, JobCancelledError

if TYPE_CHECKING:
    import optuna


def search_ended() -> JobCancelledError:
    """Returns the error of a trial that an interrupt of the search has ended."""
    return JobCancelledError("the search was ended")


class Pruning(keras.callbacks.Callback):
    """Tells Optuna the metric of each epoch of a fit, and ends a trial that it prunes; runs on the driver.

    With folds, Optuna is told the mean of the metrics of the folds that have ended and of the epoch, in a step of the
    trial's own: epochs of all its folds are counted on.

    Args:
        pruned: The error that ends a trial for Optuna.
        is_stopped: Tells whether the search was interrupted.
        ended: Metrics of the folds of this trial that have ended.
        fold: Number of the fold that is for validation; None without folds.
        epochs: Of each fit, at most.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        objective: Objective,
        pruned: type[Exception],
        is_stopped: Callable[[], bool],
        ended: Sequence[float] = (),
        fold: int | None = None,
        epochs: int = 0,
    ) -> None:
        super().__init__()
        self._trial, self._objective, self._pruned, self._is_stopped = trial, objective, pruned, is_stopped
        self._ended, self._fold, self._first_step = ended, fold, (fold or 0) * epochs

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        history = {name: [value] for name, value in (logs or {}).items()}
        self._require_rows(history)
        self._objective.require_in(history, "metric")
        if self._is_stopped():
            raise search_ended()
        if self._objective.value_of(history) is None:
            return
        step = self._first_step + epoch
        self._trial.report(statistics.fmean([*self._ended, history[self._objective.metric][-1]]), step)
        if self._trial.should_prune():
            raise self._pruned(f"after epoch {step + 1}")

    def _require_rows(self, history: Mapping[str, Any]) -> None:
        """Raises DataError where a fold has no rows for validation."""
        if self._fold is None or not history or any(name.startswith("val_") for name in history):
            return
        raise DataError(
            f"folds: expected rows in each fold. Received: none in fold {self._fold}. Ask for fewer folds, or give "
            "more rows."
        )
