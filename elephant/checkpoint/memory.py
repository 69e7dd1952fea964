"""States of a fit in the memory of its driver, where it may be started again and has no folder for checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from elephant.checkpoint.manager import Checkpoint, is_finite
from elephant.checkpoint.state import FitState

logger = logging.getLogger(__name__)


class StatesInMemory:
    """Holds the newest state of a fit whose model is finite, and that of the last epoch's end where it is another one.

    It is the store and what fills it, as `elephant.checkpoint.manager` has them apart. They end with the driver.

    >>> states = StatesInMemory()
    >>> states.keep(FitState(epochs=2))
    >>> states.keep(FitState(epochs=2, step=7))
    >>> states.latest().state.step, states.latest(suits=lambda state: not state.step).state.epochs
    (7, 2)
    """

    url = "the driver's memory"
    is_wanted = False

    def __init__(self) -> None:
        self._states: list[FitState] = []

    def keep(self, state: FitState) -> None:
        """Takes a state, in place of those that it makes useless."""
        if all(map(is_finite, state.variables)):
            self._states = [one for one in self._states if state.step and not one.step] + [state]

    def check(self) -> None:
        """Does nothing: nothing is written."""

    def finish(self, result: Sequence[np.ndarray], *, trained: bool = True) -> None:
        """Does nothing: the fit has its result, and is not started again."""

    def latest(
        self,
        note: Callable[[str], None] = logger.warning,
        *,
        epochs: int | None = None,
        suits: Callable[[FitState], bool] = lambda state: True,
    ) -> Checkpoint | None:
        """Returns the newest state that suits; None when there is none. The other arguments are for files."""
        return next((Checkpoint(state=state) for state in reversed(self._states) if suits(state)), None)

    def __enter__(self) -> StatesInMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing: the next attempt goes on from what is held."""
