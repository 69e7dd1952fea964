"""Fits in the background of an application: a handle tells how far one is, ends it, and has its result."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

from elephant.errors import JobCancelledError, brief_errors
from elephant.monitor.listeners import FitListener, Recorder


class Fitted(Protocol):
    """Fitted model, which has its history."""

    @property
    def history(self) -> dict[str, list[float]]:
        """One number per epoch by metric."""


Model = TypeVar("Model", bound=Fitted)
Inherit = Callable[[Callable[[], None]], Callable[[], None]]
# That of the fit of this thread, where it has one.
_handle: ContextVar[FitHandle[Any] | None] = ContextVar("_handle", default=None)


def require_wanted() -> None:
    """Raises JobCancelledError where the fit of this thread was cancelled by its handle."""
    handle = _handle.get()
    if handle is not None and handle.is_unwanted:
        raise JobCancelledError("fit: it was cancelled by its handle.")


def followers() -> list[FitListener]:
    """Returns the listener of the handle of this thread's fit, where it has one."""
    handle = _handle.get()
    return [] if handle is None else [handle.follower]


def session_of_fit() -> Any:
    """Returns the session of the thread that has submitted this thread's fit; None where nobody has."""
    handle = _handle.get()
    return None if handle is None else handle.session


class _Follower(Recorder):
    """Takes down when a fit has begun and how it was set."""

    def __init__(self) -> None:
        self.params: Mapping[str, Any] = {}
        self.has_begun = False

    def fit_begin(self, params: Mapping[str, Any]) -> None:
        self.params, self.has_begun = params, True


class FitHandle(Generic[Model]):
    """Fit that runs in a thread of the application, which goes on meanwhile; see `KerasEstimator.submit`.

    Its thread does not keep the application alive: one that ends takes its fits with it.

    Args:
        fit: Fits, and returns the fitted model; called in the thread.
        session: The caller's session of Spark; None where there is none.
        inherit: Has a function run with the caller's job group, pool and tags of Spark; None where there are none.

    Attributes:
        follower: Listener of the fit.
        is_unwanted: Whether it was cancelled.
        session: As given.

    Examples:
        >>> handle = estimator.submit(train_df)  # doctest: +SKIP
        >>> handle.progress["epoch"], handle.history["loss"]  # doctest: +SKIP
        >>> fitted = handle.result()  # doctest: +SKIP
    """

    def __init__(self, fit: Callable[[], Model], session: Any = None, inherit: Inherit | None = None) -> None:
        self.follower, self.session, self.is_unwanted = _Follower(), session, False
        self._fit, self._ended = fit, threading.Event()
        self._model: Model | None = None
        self._error: BaseException | None = None
        self._began, self._seconds = time.monotonic(), 0.0
        target: Callable[[], None] = self._run
        if inherit is not None:
            target = inherit(target)
        threading.Thread(target=target, name="elephant-fit", daemon=True).start()

    def _run(self) -> None:
        _handle.set(self)
        try:
            self._model = self._fit()
        except BaseException as error:
            # Whatever it is: who asks for the result gets it.
            self._error = error
        finally:
            self._seconds = time.monotonic() - self._began
            self._ended.set()

    @property
    def done(self) -> bool:
        """True if the fit has ended, well or not."""
        return self._ended.is_set()

    @property
    def history(self) -> dict[str, list[float]]:
        """One number per epoch that has ended, for the loss and every metric over all workers."""
        if self._model is not None:
            return dict(self._model.history)
        known = self.follower.record.history_by_epoch if self.follower.has_begun else {}
        # Epochs before those of a fit that was resumed.
        return {name: [math.nan if one is None else one for one in values] for name, values in known.items()}

    @property
    def progress(self) -> dict[str, Any]:
        """State of the fit, and its place in the training, by name.

        ``state``: ``"starting"``, ``"training"``, ``"ended"``, ``"failed"`` or ``"cancelled"``; ``seconds`` since
        it was submitted; ``epoch`` that it is in, from one, and ``epochs`` in all; ``step`` of the slowest worker in
        it, and ``steps`` of it; ``rows_per_s`` of all workers. Numbers that are not known yet are zero.
        """
        numbers = {"epoch": 0, "epochs": int(self.follower.params.get("epochs", 0)), "step": 0, "steps": 0}
        seconds, rows_per_s = self._seconds if self.done else time.monotonic() - self._began, 0.0
        has_trained = False
        if self.follower.has_begun:
            record = self.follower.record
            steps, has_trained = list(record.steps.values()), record.begun_at is not None
            ended = max((one.epoch + 1 for one in record.epochs), default=0)
            numbers["epoch"] = ended if self.done else min(ended + has_trained, numbers["epochs"])
            if steps:
                last = min(steps, key=lambda one: (one.epoch, one.step))
                numbers |= {"epoch": last.epoch + 1, "step": last.step, "steps": last.steps}
                rows_per_s = sum(one.rows_per_s for one in steps)
        return {"state": self._state(has_trained), "seconds": seconds, **numbers, "rows_per_s": rows_per_s}

    def _state(self, has_trained: bool) -> str:
        if not self.done:
            return "training" if has_trained else "starting"
        if self._error is None:
            return "ended"
        return "cancelled" if self.is_unwanted else "failed"

    def cancel(self) -> None:
        """Has the fit end, and `result` raise: within seconds where workers train, or are started.

        What comes before, such as a wait for executors, is not cut short. Nothing is done where the fit has ended.
        """
        if not self.done:
            self.is_unwanted = True

    @brief_errors
    def result(self, timeout_s: float | None = None) -> Model:
        """Waits for the end of the fit; returns the fitted model.

        Args:
            timeout_s: How long; None waits as long as it takes.

        Raises:
            TimeoutError: The fit still runs.
            JobCancelledError: It was cancelled.
            Exception: Whatever `KerasEstimator.fit` has raised.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"result: the fit still runs after {timeout_s:g} s: {self!r}. Wait longer, or cancel().")
        if self._error is not None:
            raise self._error
        if self._model is None:
            raise RuntimeError("result: the fit has ended without a model and without an error.")
        return self._model

    def __repr__(self) -> str:
        now = self.progress
        epoch = f", epoch {now['epoch']}/{now['epochs']}" if now["epoch"] else ""
        return f"FitHandle({now['state']}, {now['seconds']:.1f} s{epoch})"
