"""States of a fit in its driver's memory: newer than checkpoints, or in their place where there is no folder."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from elephant.checkpoint.manager import Checkpoint, CheckpointWriter, has_finite_model
from elephant.checkpoint.state import FitState

logger = logging.getLogger(__name__)


class StatesInMemory:
    """Holds the newest state of a fit whose model is finite, and that of the last epoch's end where it is another one.

    Where the fit has a folder, what is due goes there too. They end with the driver.

    Args:
        is_saved: Returns whether the state of an epoch's end is a checkpoint.
        seconds: Between two checkpoints within epochs; None makes none.

    >>> states = StatesInMemory()
    >>> states.keep(FitState(epochs=2))
    True
    >>> states.keep(FitState(epochs=2, step=7))
    False
    >>> states.latest().state.step, states.latest(suits=lambda state: not state.step).state.epochs
    (7, 2)
    """

    url = "the driver's memory"

    def __init__(
        self, is_saved: Callable[[FitState], bool] = lambda state: True, *, seconds: float | None = None
    ) -> None:
        self._is_saved = is_saved
        self._seconds = seconds
        self._states: list[FitState] = []
        self._writer: CheckpointWriter | None = None
        self._is_wished = False
        self._written_state: FitState | None = None
        self._written_at = time.monotonic()

    @contextlib.contextmanager
    def writing(self, writer: CheckpointWriter) -> Iterator[StatesInMemory]:
        """Has a folder get what is due, for the ``with`` block; where it fails, the newest state as well."""
        self._writer = writer
        try:
            with writer:
                try:
                    yield self
                except BaseException:
                    if self._states and self._states[-1] is not self._written_state:
                        writer.keep(self._states[-1])
                    raise
        finally:
            self._writer = None

    @property
    def is_wanted(self) -> bool:
        """True once after somebody has asked for a checkpoint."""
        if self._writer is None or not self._writer.is_wanted:
            return False
        self._is_wished = True
        return True

    @property
    def held(self) -> list[FitState]:
        """States that are here, or on their way to the folder."""
        return [*self._states, *([] if self._writer is None else self._writer.held)]

    def keep(self, state: FitState) -> bool:
        """Takes a state, in place of those that it makes useless; returns whether it is a checkpoint."""
        if has_finite_model(state):
            self._states = [one for one in self._states if state.step and not one.step] + [state]
        is_due = self._is_due(state)
        if is_due and self._writer is not None:
            self._writer.keep(state)
            self._written_state, self._written_at, self._is_wished = state, time.monotonic(), False
        return is_due

    def _is_due(self, state: FitState) -> bool:
        if self._is_wished or (not state.step and self._is_saved(state)):
            return True
        return self._seconds is not None and time.monotonic() - self._written_at >= self._seconds

    def check(self) -> None:
        """Raises CheckpointError once when a state could not be written."""
        if self._writer is not None:
            self._writer.check()

    def finish(self, result: Sequence[np.ndarray], *, trained: bool = True) -> None:
        """Marks the fit in the folder as ended, where there is one; raises CheckpointError where that fails."""
        if self._writer is not None:
            self._writer.finish(result, trained=trained)

    def latest(
        self,
        note: Callable[[str], None] = logger.warning,
        *,
        epochs: int | None = None,
        suits: Callable[[FitState], bool] = lambda state: True,
    ) -> Checkpoint | None:
        """Returns the newest state that suits; None when there is none. The other arguments are for files."""
        return next((Checkpoint(state=state) for state in reversed(self._states) if suits(state)), None)
