"""A gentle start for large learning rates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from elephant import collective
from elephant.backends.keras_private import has_schedule
from elephant.errors import ConfigurationError
from elephant.modeling.variables import parts_of


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate from a fraction of itself to its full value over the first epochs, step by step.

    Large batches want large learning rates, which are unstable at the start (Goyal et al. 2017,
    section 2.2). The rate grows in a straight line; after the warm-up this callback leaves it alone, so
    that `keras.callbacks.ReduceLROnPlateau` and others can change it.

    Args:
        epochs: Length of the warm-up, in epochs; 1 or more.
        initial: Fraction of the learning rate to start from, in (0, 1]. None starts from one part in as
            many as there are workers: with ``scaleLearningRate`` that is the rate before scaling. The GPUs of one
            worker share its batch, and do not count. In a function of `elephant.run` every rank is a worker.

    Raises:
        ConfigurationError: A value is out of its range; or, when training begins, the
            optimizer's learning rate follows a schedule.

    Examples:
        >>> import elephant
        >>> warmup = elephant.LearningRateWarmup(epochs=3)
    """

    def __init__(self, epochs: int = 5, *, initial: float | None = None) -> None:
        super().__init__()
        if not isinstance(epochs, int) or epochs < 1:
            raise ConfigurationError(f"epochs: expected an integer of at least 1. Received: {epochs!r}.")
        if initial is not None and not 0 < initial <= 1:
            raise ConfigurationError(f"initial: expected a number in (0, 1]. Received: {initial!r}.")
        self._epochs = epochs
        self._initial = initial
        self._workers: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizers = parts_of(self.model.optimizer)
        if any(map(has_schedule, optimizers)):
            raise ConfigurationError(
                "LearningRateWarmup: expected an optimizer with a constant learning rate. Received: one with a "
                "schedule. Let the schedule begin with the warm-up, such as CosineDecay(warmup_steps=...)."
            )
        self._targets = [float(keras.ops.convert_to_numpy(one.learning_rate)) for one in optimizers]
        self._start = self._initial if self._initial is not None else 1.0 / (self._workers or collective.world_size())
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = self.params.get("steps")
        if self._epoch >= self._epochs or not steps:
            return
        done = min((self._epoch * steps + batch) / (self._epochs * steps), 1.0)
        self._set_part(self._start + (1 - self._start) * done)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if epoch == self._epochs - 1:
            self._set_part(1.0)

    def _set_part(self, part: float) -> None:
        for optimizer, target in zip(parts_of(self.model.optimizer), self._targets, strict=True):
            optimizer.learning_rate = target * part


def broadcast_rate(callbacks: Iterable[keras.callbacks.Callback], num_workers: int) -> None:
    """Tells warm-ups how many workers a fit has, of which each may have several ranks.

    Args:
        callbacks: Any, before training begins.
        num_workers: Workers.
    """
    for callback in callbacks:
        if isinstance(callback, LearningRateWarmup):
            callback._workers = num_workers
