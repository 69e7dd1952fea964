"""Keras' own ``fit``, begun at any step of any epoch, left at ends of epochs, and taken by one step or several."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from elephant.backends import current
from elephant.backends.base import Steps
from elephant.backends.keras_private import flat_layers
from elephant.errors import DataError
from elephant.rank.rank_progress import RankWeight

# Limits of the steps that one call takes. So long a failure, or the news of where a rank is, may wait.
_RUN_S = 0.05
_LONGEST_RUN = 64
# Whole batches of a rank in a fit for which a graph is traced that knows their rows. That takes 0.3 to 0.9 s; a step
# of it takes 3 to 12 % less time.
_WORTH_TRACING = 2000
_FINALIZE = "finalize_variable_values"


class FitPaused(Exception):  # noqa: N818 - no error
    """Leaves Keras' ``fit`` at an epoch's end, past all that it does when training has ended."""


class FitCallbacks(keras.callbacks.CallbackList):
    """Callbacks of a fit that may begin within an epoch: they hear of its first epoch as of the others.

    Keras counts the steps of its first epoch from zero, and takes as many as in each. Here they count on from where
    the fit begins; the epoch is cut where it ends, by the flag with which callbacks stop a fit, which is taken back.

    Args:
        callbacks: The callbacks.
        epochs: Of the fit, up to which Keras' callbacks count.
        steps: Of an epoch.
        first: The step of the first epoch with which the fit begins.
        pauses: Whether to leave `fit_from` at the epoch's end that all callbacks have heard of; they hear nothing of
            that, nor of its begin when it is called again.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        epochs: int,
        steps: int,
        first: int = 0,
        pauses: Callable[[], bool] = lambda: False,
    ) -> None:
        # Keras gives a list of its own what it calls params; `fit` gives this one none.
        super().__init__(list(callbacks), add_history=True, model=model, verbose=0, epochs=epochs, steps=steps)
        self._first = first
        self._last = steps - 1
        self._cuts = self._goes_on = False
        self._pauses = pauses

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self._goes_on:
            super().on_train_begin(logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch + self._first, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        batch += self._first
        super().on_train_batch_end(batch, logs)
        if self._first and batch == self._last and not self._model.stop_training:
            self._cuts = self._model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._cuts:
            self._cuts = self._model.stop_training = False
        self._first = 0
        super().on_epoch_end(epoch, logs)
        if self._pauses():
            self._goes_on = True
            # On JAX, Keras ends the optimizer's work whatever ends its fit: averages would take the place of weights.
            setattr(self._model.optimizer, _FINALIZE, lambda variables: None)
            raise FitPaused(epoch)


class StepRuns(FitCallbacks):
    """Callbacks of a fit that takes its steps in runs: one call for as many of them as last `_RUN_S`.

    Keras' loop takes a large part of a small model's step. To it, an epoch is one execution of all steps. Callbacks
    hear of a run as of a batch, so that none may be there that looks at batches, but elephant's own.

    Args:
        callbacks: The callbacks.
        epochs: Of the fit, up to which Keras' callbacks count.
        steps: Takes steps; see `elephant.backends.base.Backend.steps_function`.
        weight: Weight of the rank; the same in all steps of a run, unless the plan varies.
        pauses: As of `FitCallbacks`.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        epochs: int,
        steps: Steps,
        weight: RankWeight,
        pauses: Callable[[], bool] = lambda: False,
    ) -> None:
        # To Keras, each epoch is one execution: none has steps that it leaves out.
        super().__init__(callbacks, model, epochs, weight.plan.steps, pauses=pauses)
        self._steps = steps
        self._weight = weight
        self._length = 1
        whole = weight.plan.training_rows[weight.rank] // weight.plan.batch_size * epochs
        is_worth_it = whole * weight.plan.steps >= _WORTH_TRACING * weight.plan.pass_steps
        self._knows_rows = is_worth_it and not weight.plan.varies
        # For Keras' loop, which reads it when it begins.
        model.steps_per_execution = weight.plan.steps
        model.make_train_function = self._make_train_function

    def _make_train_function(self, force: bool = False) -> None:
        if force:
            # What is traced may have changed, as where a callback freezes a layer.
            begins = self._weight.begin_next if self._weight.plan.varies else None
            self._steps = current().steps_function(self._model, begins) or self._steps
        self._model.train_function = self._take_epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validations are no part of it.
        self._model.steps_per_execution = 1
        super().on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        try:
            super().on_epoch_end(epoch, logs)
        except FitPaused:
            self._model.steps_per_execution = self._weight.plan.steps
            raise

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing: it is the epoch that begins."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing: it is the epoch that ends."""

    def _take_epoch(self, iterator: Any) -> Any:
        plan, epoch, first, logs = self._weight.plan, self._weight.epoch, self._weight.step, None
        while first < plan.steps:
            number = plan.number(epoch, first)
            count = min(self._length, plan.next_change(number) - number, plan.steps - first)
            if self._weight.pause > first:
                count = min(count, self._weight.pause - first)
            super().on_train_batch_begin(first)
            self._weight.begin_run(first)
            began = time.monotonic()
            logs = self._steps(iterator, count, self._known_rows(number))
            # A clock may stand still for a short call.
            step_s = max(time.monotonic() - began, 1e-6) / count
            super().on_train_batch_end(first + count - 1, logs)
            self._length = max(1, min(2 * self._length, _LONGEST_RUN, int(_RUN_S / step_s)))
            first += count
        return logs

    def _known_rows(self, number: int) -> int | None:
        """Returns how many rows the step has, where a graph for whole batches is worth its tracing; None otherwise."""
        plan = self._weight.plan
        is_whole = plan.rows_at(self._weight.rank, number) == plan.batch_size
        return plan.batch_size if self._knows_rows and is_whole else None


def fit_from(model: keras.Model, batches: Any, callbacks: FitCallbacks, epoch: int, *, epochs: int, steps: int) -> bool:
    """Trains a model by its own ``fit`` from any step on, in every mode: at the begin, after a loss, and after a pause.

    Args:
        batches: From the first one on that is to be trained on.
        callbacks: They know the step, where it is not an epoch's first one.
        epoch: The epoch to begin with, from zero.
        epochs: Of the whole fit.
        steps: Of an epoch.

    Returns:
        Whether training has ended; where it has not, the callbacks have asked for a pause.

    Raises:
        DataError: An embedding has no row for a number that was looked up.
    """
    try:
        model.fit(
            batches,
            initial_epoch=epoch,
            epochs=epochs,
            steps_per_epoch=steps,
            callbacks=callbacks,
            shuffle=False,  # the feed has done it
            verbose=0,
        )
    except FitPaused:
        delattr(model.optimizer, _FINALIZE)
        return False
    except Exception as error:
        refused = _outside_table(model, error)
        if refused is None:
            raise
        raise refused from None
    return True


def _outside_table(model: keras.Model, error: Exception) -> DataError | None:
    """Returns the error of a number that an embedding of Keras has no row for, where the framework's says just that."""
    pattern = current().outside_table
    found = re.search(pattern, str(error)) if pattern else None
    if found is None:
        return None
    number, num_rows, node = found[1], int(found[2]), found[3]
    embeddings = [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.Embedding)]
    # A framework counts the calls of a layer in its name.
    called = [one.name for one in embeddings if one.input_dim == num_rows and node in (one.name, f"{one.name}_1")]
    if not called:
        return None
    return DataError(
        f"model: expected numbers from 0 to {num_rows - 1} for the layer {' or '.join(map(repr, called))}, an "
        f"Embedding with input_dim={num_rows}. Received: {number}. Build it with a larger input_dim, or number the "
        "values anew, as pyspark.ml.feature.StringIndexer and keras.layers.IntegerLookup do.",
        topic="a-number-that-an-embedding-has-no-row-for",
    )
