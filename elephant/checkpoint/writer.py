"""Writes checkpoints beside a fit that goes on meanwhile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from elephant.checkpoint.manager import CheckpointManager
from elephant.checkpoint.state import FitState
from elephant.errors import CheckpointError
from elephant.net.work_queue import WorkQueue


class CheckpointSink(Protocol):
    """What takes the states of a fit that it could go on from."""

    def keep(self, state: FitState) -> None:
        """Takes a state; returns at once."""

    def check(self) -> None:
        """Raises CheckpointError when one that was taken could not be kept."""


class CheckpointWriter:
    """Writes what it is given in a thread of its own; where epochs are faster than the disk, the newest one counts.

    Leaving its ``with`` block waits for what is being written.
    """

    def __init__(self, store: CheckpointManager) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._newest: FitState | None = None
        self._error: CheckpointError | None = None
        self._queue = WorkQueue("elephant-checkpoints")

    def keep(self, state: FitState) -> None:
        """Has a state written; returns at once."""
        with self._lock:
            self._newest = state
            self._queue.submit(self._save_newest)

    def check(self) -> None:
        """Raises CheckpointError once when a state could not be written."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self, result: Sequence[np.ndarray], *, trained: bool = True) -> None:
        """Waits until all is written, and marks the fit as ended.

        Raises:
            CheckpointError: Something could not be written.
        """
        self._queue.wait()
        self.check()
        error = self._failure_of(lambda: self._store.finish(result, trained=trained))
        if error is not None:
            raise error

    def _save_newest(self) -> None:
        with self._lock:
            state, self._newest = self._newest, None
        if state is not None:
            error = self._failure_of(functools.partial(self._store.save, state))
            with self._lock:
                self._error = error or self._error

    def _failure_of(self, write: Callable[[], None]) -> CheckpointError | None:
        """Returns why something could not be written; file systems of others have errors of their own kinds."""
        try:
            write()
        except CheckpointError as error:
            return error
        except Exception as error:
            failure = CheckpointError(f"checkpointPath={self._store.url}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        return None

    def close(self) -> None:
        """Waits for what is being written, and ends the thread."""
        self._queue.wait()
        self._queue.close()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
