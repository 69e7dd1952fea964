"""The user's callbacks on the driver of an asynchronous fit: the events of epochs and of the whole training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from elephant.checkpoint.state import FitState
from elephant.errors import UnsupportedError
from elephant.modeling.optimizer_translation import inner_optimizer
from elephant.training.callback_states import continue_files, restore_states
from elephant.training.callbacks import check_callbacks, listens
from elephant.training.mounted_files import MountedFiles
from elephant.training.warmup import LearningRateWarmup

# What they do at the end of an epoch follows from its numbers alone.
_WITHOUT_WEIGHTS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
)


def check_asynchronous_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises for what is no callback, and for what cannot work where workers train at their own pace.

    Raises:
        ConfigurationError: Something is no callback.
        UnsupportedError: A callback needs steps that all workers take together.
    """
    check_callbacks(callbacks)
    for callback in callbacks:
        if isinstance(callback, LearningRateWarmup):
            raise UnsupportedError(
                "callbacks: LearningRateWarmup changes the rate between steps that all workers take together, and "
                "workers that train at their own pace take none. Let a schedule begin with the warm-up when you "
                "compile, such as keras.optimizers.schedules.CosineDecay(..., warmup_target=..., warmup_steps=...)."
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise UnsupportedError(
                f"callbacks: ModelCheckpoint runs on the driver, which sees epochs. Received: save_freq="
                f"{callback.save_freq!r}. Use save_freq='epoch', or mode='synchronous'."
            )


class DriverCallbacks:
    """Tells the user's own callback objects about epochs, and does what they ask for.

    Args:
        model: The driver's copy of the model, which the callbacks get.
        callbacks: The user's.
        epochs: Epochs of the fit.
        state: What the fit goes on from; None begins it.
        refresh: Gives the model the servers' weights, and whatever else they keep, as they are now.
        set_rate: Gives the servers a new learning rate.
        stop: Tells all workers to stop.

    Attributes:
        stopped: Whether one of the callbacks has asked to stop, after which epochs do not count any more.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        epochs: int,
        state: FitState | None = None,
        refresh: Callable[[keras.Model], None],
        set_rate: Callable[[float], None],
        stop: Callable[[], None],
    ) -> None:
        self._model = model
        self._epochs = epochs
        self._own = list(callbacks)
        self._state = state
        self._refresh = refresh
        self._set_rate = set_rate
        self._stop = stop
        self._needs_weights = any(_looks_at_weights(callback) for callback in callbacks)
        self._mounted = MountedFiles(callbacks)
        self._last = _LastOfAll()
        # The numbers of steps are each worker's own.
        self._callbacks = keras.callbacks.CallbackList(
            [*callbacks, self._mounted, self._last], model=model, epochs=epochs, steps=None, verbose=0
        )
        self._rate = self._rate_of_model()
        self.stopped = False

    def begin(self) -> None:
        """Tells that training and its first epoch begin; before the workers start."""
        self._model.stop_training = False
        if self._state is None:
            self._callbacks.on_train_begin()
        else:
            self._begin_again(self._state)
        first = 0 if self._state is None else self._state.epochs
        if first < self._epochs:
            self._callbacks.on_epoch_begin(first)
        self._do_what_they_asked()

    def _begin_again(self, state: FitState) -> None:
        continue_files(self._own)
        self._callbacks.on_train_begin()
        restore_states(zip(self._own, state.facts["callbacks"], strict=False), state.arrays)
        if self._rate is not None:
            # They have begun as if training did: some change the learning rate then.
            self._model.optimizer.learning_rate = self._rate

    def epoch_ended(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any] | None:
        """Tells that all workers have ended an epoch, and that the next one begins if there is one.

        Args:
            epoch: From zero.
            logs: The epoch's numbers over all workers.

        Returns:
            The logs with what callbacks have added, such as the learning rate; None after a callback has asked
            to stop: the epoch is one that workers had begun before they heard of it.
        """
        if self.stopped:
            return None
        if self._needs_weights:
            self._refresh(self._model)
        self._callbacks.on_epoch_end(epoch, logs)
        self._do_what_they_asked()
        if not self.stopped and epoch + 1 < self._epochs:
            self._callbacks.on_epoch_begin(epoch + 1)
            self._do_what_they_asked()
        return self._last.logs

    def end(self) -> None:
        """Gives the model what the servers have at the end, and tells that training has ended.

        What the model holds afterwards is the result: callbacks may have changed it, as
        ``EarlyStopping(restore_best_weights=True)`` does.
        """
        self._refresh(self._model)
        self._callbacks.on_train_end(self._last.logs)

    def close(self) -> None:
        """Gives the callbacks their own paths back, where a failure has kept training from ending."""
        self._mounted.close()

    def _do_what_they_asked(self) -> None:
        rate = self._rate_of_model()
        if rate is not None and rate != self._rate:
            self._rate = rate
            self._set_rate(rate)
        if self._model.stop_training and not self.stopped:
            self.stopped = True
            self._stop()

    def _rate_of_model(self) -> float | None:
        """Returns the model's learning rate, or None when it follows a schedule, which nobody can change."""
        optimizer = inner_optimizer(self._model.optimizer)
        if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
        return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


class _LastOfAll(keras.callbacks.Callback):
    """Keeps the logs as the callbacks before it have left them."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.logs = dict(logs or {})


def _looks_at_weights(callback: keras.callbacks.Callback) -> bool:
    if type(callback) is keras.callbacks.EarlyStopping:
        return bool(callback.restore_best_weights)
    return listens(callback, "on_epoch_begin", "on_epoch_end") and type(callback) not in _WITHOUT_WEIGHTS
