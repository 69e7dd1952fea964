"""Callbacks on the driver: what they hear of epochs, and what they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from elephant.checkpoint.state import FitState
from elephant.errors import UnsupportedError
from elephant.modeling.variables import constant_rate
from elephant.rank.callbacks.callback_rules import EPOCH_EVENTS, check_callbacks, reads_weights
from elephant.rank.callbacks.remote_files import RemoteFiles
from elephant.rank.checkpoints import continue_files, restore_states
from elephant.storage.folder import Folder, folder_at
from elephant.training.warmup import LearningRateWarmup


def check_asynchronous_callbacks(callbacks: Sequence[Any], *, in_rounds: bool = False) -> None:
    """Raises for what is no callback, and for what cannot work where the driver sees epochs alone.

    Args:
        in_rounds: Whether workers take steps together.

    Raises:
        ConfigurationError: Something is no callback.
        UnsupportedError: A callback needs steps that all workers take together, and hear of.
    """
    check_callbacks(callbacks)
    other_way = "aggregation='allreduce'" if in_rounds else "mode='synchronous'"
    pace = "hear of a rate between epochs alone" if in_rounds else "train at their own pace take none"
    for callback in callbacks:
        if isinstance(callback, LearningRateWarmup):
            raise UnsupportedError(
                "callbacks: LearningRateWarmup changes the rate between steps that all workers take together, and "
                f"{'servers' if in_rounds else 'workers that'} {pace}. Let a schedule begin with the warm-up when you "
                "compile, such as keras.optimizers.schedules.CosineDecay(..., warmup_target=..., warmup_steps=...)."
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise UnsupportedError(
                f"callbacks: ModelCheckpoint runs on the driver, which sees epochs. Received: save_freq="
                f"{callback.save_freq!r}. Use save_freq='epoch', or {other_way}."
            )


class DriverCallbacks:
    """Tells the user's own callback objects about epochs, and does what they ask for.

    Args:
        steps: Steps of an epoch; None where each worker has a number of its own.
        state: What the fit goes on from; None begins it.
        folder_of: Opens the folders of URLs that they write to.

    Attributes:
        stopped: Whether one of the callbacks has asked to stop, after which epochs do not count any more.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        epochs: int,
        steps: int | None = None,
        state: FitState | None = None,
        refresh: Callable[[keras.Model], None],
        set_rate: Callable[[float], None],
        stop: Callable[[], None],
        folder_of: Callable[[str], Folder] = folder_at,
    ) -> None:
        self._model = model
        self._epochs = epochs
        self._own = list(callbacks)
        self._state = state
        self._refresh = refresh
        self._set_rate = set_rate
        self._stop = stop
        self._needs_weights = any(reads_weights(callback, *EPOCH_EVENTS) for callback in callbacks)
        self._remote = RemoteFiles(callbacks, folder_of)
        self._last = _LastOfAll()
        self._appending: list[tuple[keras.callbacks.CSVLogger, bool]] = []
        self._callbacks = keras.callbacks.CallbackList(
            [*callbacks, self._remote, self._last], model=model, epochs=epochs, steps=steps, verbose=0
        )
        self._rate = constant_rate(model)
        self._begun: int | None = None
        self.stopped = False

    def begin(self) -> None:
        """Tells that training and its first epoch begin; before the workers start."""
        self._model.stop_training = False
        if self._state is None:
            self._callbacks.on_train_begin()
            self._begin_epoch(0)
        else:
            self._begin_again(self._state)
        self._do_what_they_asked()

    def has_begun(self, epoch: int) -> bool:
        """Returns whether it has told that an epoch, from zero, begins; what callbacks remember is as of then."""
        return self._begun == epoch

    def _begin_epoch(self, epoch: int) -> None:
        if epoch < self._epochs:
            self._callbacks.on_epoch_begin(epoch)
            self._begun = epoch

    def _begin_again(self, state: FitState) -> None:
        self._appending = [(one, one.append) for one in self._own if isinstance(one, keras.callbacks.CSVLogger)]
        continue_files(self._own)
        self._callbacks.on_train_begin()
        # What they do when the epoch begins is in what they remember, and in the rate, or is to come.
        if state.step or state.facts.get("begun"):
            self._begin_epoch(state.epochs)
            self._restore(state)
        else:
            self._restore(state)
            self._begin_epoch(state.epochs)

    def _restore(self, state: FitState) -> None:
        restore_states(zip(self._own, state.facts["callbacks"], strict=False), state.arrays)
        if self._rate is not None:
            # They have begun as if training did: some change the learning rate then.
            self._model.optimizer.learning_rate = self._rate

    def epoch_ended(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any] | None:
        """Tells that all workers have ended an epoch, and that the next one begins if there is one.

        Args:
            epoch: From zero.

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
        if not self.stopped:
            self._begin_epoch(epoch + 1)
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
        self._remote.close()
        for logger_of_epochs, appended in self._appending:
            logger_of_epochs.append = appended

    def _do_what_they_asked(self) -> None:
        rate = constant_rate(self._model)
        if rate is not None and rate != self._rate:
            self._rate = rate
            self._set_rate(rate)
        if self._model.stop_training and not self.stopped:
            self.stopped = True
            self._stop()


class _LastOfAll(keras.callbacks.Callback):
    """Keeps the logs as the callbacks before it have left them."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.logs = dict(logs or {})
