"""Listeners on the driver: what experiment trackers and monitoring hear of a fit."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import methodcaller
from typing import Any

from packaging.version import Version

from elephant.backends.keras_private import flat_layers
from elephant.errors import warn_user
from elephant.monitor.events import EpochEnded, Event, StateSaved
from elephant.monitor.record import FitRecord, is_one_stage

# A file is not written again for the end of an epoch where writing would take more than this part of the time.
_WRITING = 0.05
_QUICK_S = 0.05
# What is of the moment, such as the step that ranks are in, is written once in so many seconds.
_MOMENT_S = 5.0
# MLflow keeps so much of a param's value.
_PARAM_CHARACTERS = 6000
_LOGGED = "elephant.fit"
EVENTS_TAG = "elephant.events"
# What MLflow logs by itself of a fit of Keras, and of Spark ML.
_FLAVORS = ("keras", "tensorflow", "pyspark.ml")


class FitListener:
    """Hears on the driver what happens in a fit. Subclass it, and pass instances among ``driverCallbacks``.

    One that raises is warned of, gets its own error as the end of the fit, and hears nothing more; the fit goes on.

    Examples:
        >>> class Watch(FitListener):
        ...     def epoch_end(self, epoch, metrics, seconds):
        ...         print(epoch, metrics["loss"])
        >>> Watch().epoch_end(0, {"loss": 0.5}, 1.5)
        0 0.5
    """

    def fit_begin(self, params: Mapping[str, Any]) -> None:
        """A fit begins.

        Args:
            params: The estimator's params by name, as far as they are text, numbers, lists or dictionaries of these.
        """

    def epoch_end(self, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        """All workers have ended an epoch.

        Args:
            epoch: From zero.
            metrics: The numbers of all workers together.
            seconds: Since the end of the epoch before, or the begin of training.
        """

    def worker_lost(self, rank: int, host: str, reason: str) -> None:
        """A worker has failed, or is not heard of any more.

        Args:
            rank: Which one.
            host: Where it ran; empty where that is not known.
            reason: One line.
        """

    def checkpoint(self, epochs: int) -> None:
        """A state from which the fit can go on is about to be written to ``checkpointPath``.

        Args:
            epochs: Epochs that are done.
        """

    def fit_end(self, fitted: Any, error: BaseException | None) -> None:
        """The fit has ended.

        Args:
            fitted: The `elephant.KerasModel`; None where it has failed.
            error: Why it has failed; None where it has not.
        """


class Recorder(FitListener):
    """Listener that takes every event as it comes, besides; those of this package alone.

    Attributes:
        record: What the events so far say together; set before the fit begins.
        param: Name of the param that says where it writes; empty where it writes nothing.
    """

    record: FitRecord
    param = ""

    def show(self, event: Event) -> None:
        """Takes an event."""


class Listeners:
    """Tells listeners of the events of a fit, in a ``with`` block around it.

    Args:
        listeners: Told in their order.
        params: As `FitListener.fit_begin` gets them.

    Attributes:
        params: As listeners get them.
        record: What the events so far say together.
        fitted: The fitted model, when there is one.
    """

    def __init__(self, listeners: Sequence[FitListener] = (), params: Mapping[str, Any] | None = None) -> None:
        self._listeners = list(listeners)
        self.params = params or {}
        self.record = FitRecord(together=is_one_stage(self.params, "synchronous"))
        self.fitted: Any = None
        for recorder in self._recorders:
            recorder.record = self.record

    def __enter__(self) -> Listeners:
        self._tell(lambda listener: listener.fit_begin(self.params))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._tell(lambda listener: listener.fit_end(self.fitted, error), is_end=True)

    @property
    def _recorders(self) -> list[Recorder]:
        return [listener for listener in self._listeners if isinstance(listener, Recorder)]

    def show(self, event: Event) -> Event:
        """Takes an event; returns it as `FitRecord.add` does."""
        if not self._listeners:
            return self.record.add(event)
        num_losses = len(self.record.losses)
        known = self.record.add(event)
        # Whether an epoch has just ended, or is one of a log, its own seconds say.
        told = event if isinstance(event, EpochEnded) else known
        self._tell(lambda listener: listener.show(told) if isinstance(listener, Recorder) else None)
        if isinstance(known, EpochEnded):
            self._tell_epoch(known)
        elif isinstance(known, StateSaved):
            self._tell(lambda listener: listener.checkpoint(known.epochs))
        for loss in self.record.losses[num_losses:]:
            self._tell(methodcaller("worker_lost", loss.rank, loss.host, loss.reason))
        return known

    def _tell_epoch(self, ended: EpochEnded) -> None:
        metrics = {name: value for name, value in ended.logs.items() if isinstance(value, float)}
        self._tell(lambda listener: listener.epoch_end(ended.epoch, metrics, ended.seconds or 0.0))

    def _tell(self, tell: Callable[[FitListener], None], *, is_end: bool = False) -> None:
        for listener in list(self._listeners):
            try:
                tell(listener)
            except Exception as error:
                self._listeners.remove(listener)
                # The end is told once, be it that of the fit or of the listener; what is written of the fit is not to
                # say that it has failed.
                if not is_end and not isinstance(listener, Recorder):
                    with contextlib.suppress(Exception):
                        listener.fit_end(None, error)
                what = "at the end of the fit" if is_end else "and hears nothing more of this fit, which goes on"
                text = f"{type(listener).__name__} has failed {what}: {type(error).__name__}: {error}"
                if isinstance(listener, Recorder) and listener.param:
                    text = (
                        f"{listener.param}: expected a folder into which files can be written. Received: "
                        f"{type(error).__name__}: {error}. The fit goes on, and leaves no file there."
                    )
                warn_user(text)


class ModelOutput:
    """Place where the program of a fit saves its model, once the fit has ended.

    Args:
        path: As the program was given it.

    Attributes:
        files: Event files of the fits that have ended well, and whose model is being saved.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.files: list[EventFile] = []


# That of the program that fits in this thread, where it has one.
_output: ContextVar[ModelOutput | None] = ContextVar("_output", default=None)


@contextlib.contextmanager
def saving_model_at(path: str) -> Iterator[None]:
    """Has the files of events of the fits in its block say where the block saves the model, and whether it has.

    Args:
        path: Where it does.

    Examples:
        >>> with saving_model_at("s3://bucket/model"):
        ...     pass  # fit, and save
    """
    output = ModelOutput(path)
    token = _output.set(output)
    error: BaseException | None = None
    try:
        yield
    except BaseException as problem:
        error = problem
        raise
    finally:
        _output.reset(token)
        for file in output.files:
            # The model is there, or its error goes on.
            with contextlib.suppress(Exception):
                file.model_saved(path, error)


class EventFile(Recorder):
    """Writes a line of JSON for each event of a fit.

    Each has ``event``, the name of a method of `FitListener`, ``time``, seconds since 1970, and the method's arguments;
    besides, events that have a line by their class (`elephant.monitor.events.Event.line`) have one. What is not finite
    is null. The file ends with events of the moment, which go when it is written again. Where it cannot be written
    while the fit goes on, that is warned of once, and tried again. See ``docs/progress.md``;
    `elephant.monitor.summary.FitSummary.of_events` reads it.

    Args:
        write: Replaces the content of the file.
        facts: More of what ``fit_begin`` has.
        has_moments: Whether it is written for what is of the moment, and not only for what stays.
    """

    param = "eventsPath"

    def __init__(
        self, write: Callable[[bytes], None], facts: Mapping[str, Any] | None = None, *, has_moments: bool = True
    ) -> None:
        self._write = write
        self._output = _output.get()
        self._facts = {**(facts or {}), **({} if self._output is None else {"output": self._output.path})}
        self._has_moments = has_moments
        self._lines = b""
        self._resting_until = self._next_moment = 0.0
        self._warns = True

    def _add(self, event: str, **fields: Any) -> None:
        self._lines += _line(event, **fields)

    def _save(self, *, is_edge: bool = False) -> None:
        """Writes the file; what fails is tried again with what comes next, but for the begin and the end of the fit."""
        began, is_written = time.monotonic(), True
        try:
            self._write(self._lines if is_edge else self._lines + self._moment())
        except Exception as error:
            if is_edge:
                raise
            # A store may be busy, or away for a moment.
            is_written = False
            if self._warns:
                self._warns = False
                warn_user(
                    "eventsPath: the events of this fit could not be written, and are tried again while it goes on: "
                    f"{type(error).__name__}: {error}"
                )
        ended = time.monotonic()
        self._resting_until = ended + (ended - began) / _WRITING if ended - began > _QUICK_S else 0.0
        self._next_moment = max(ended + _MOMENT_S, self._resting_until)
        if not is_written:
            self._resting_until = self._next_moment

    def _moment(self) -> bytes:
        """Returns the lines of what is now, and is not to stay."""
        awaited, steps = self.record.awaited, self.record.steps
        events: list[Event] = [steps[rank] for rank in sorted(steps)] if awaited is None else [awaited]
        return b"".join(_line(event.line, **event.line_values()) for event in events)

    def fit_begin(self, params: Mapping[str, Any]) -> None:
        self._add("fit_begin", params=dict(params), **self._facts)
        self._save(is_edge=True)

    def show(self, event: Event) -> None:
        # Written with what comes next.
        if event.line and not event.of_moment:
            self._add(event.line, **event.line_values())
        if self._has_moments and time.monotonic() >= self._next_moment:
            self._save()

    def epoch_end(self, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        self._add("epoch_end", epoch=epoch, metrics=dict(metrics), seconds=round(seconds, 3))
        if time.monotonic() >= self._resting_until:
            self._save()

    def worker_lost(self, rank: int, host: str, reason: str) -> None:
        self._add("worker_lost", rank=rank, host=host, reason=reason)
        self._save()

    def checkpoint(self, epochs: int) -> None:
        self._add("checkpoint", epochs=epochs)
        self._save()

    def fit_end(self, fitted: Any, error: BaseException | None) -> None:
        about = None if fitted is None else fitted.summary
        parts = ("seconds", "history", "statistics", "before")
        more = {} if about is None else {name: getattr(about, name) for name in parts}
        self._add("fit_end", error=_in_words(error), **more)
        self._save(is_edge=True)
        if self._output is not None and error is None:
            self._output.files.append(self)

    def model_saved(self, path: str, error: BaseException | None) -> None:
        """The program of the fit has saved the model, or has failed to.

        Args:
            path: Where.
            error: Why it is not there; None where it is.
        """
        self._add("model_saved", path=path, error=_in_words(error))
        self._save(is_edge=True)


def _in_words(error: BaseException | None) -> str | None:
    return None if error is None else ": ".join(filter(None, [type(error).__name__, str(error)]))


def _line(event: str, **fields: Any) -> bytes:
    text = json.dumps(_finite({"event": event, "time": time.time(), **fields}), default=str)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    """Returns a value as JSON knows it, which has no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MlflowListener(FitListener):
    """Logs a fit to the active run of MLflow: params, the metrics of every epoch, and the model.

    A second fit in the same run, as a tuning has them, gets a run of its own, nested in it. So does a fit without one.

    Args:
        events: The file of the fit's events, which the run names in a tag; empty where there is none.
        leaves_metrics: Whether a callback of the fit logs the metrics to the same run.
    """

    def __init__(self, events: str = "", *, leaves_metrics: bool = False) -> None:
        import mlflow

        self._mlflow = mlflow
        self._events = events
        self._client = mlflow.MlflowClient()
        self._run_id = ""
        self._is_own = False
        self._epoch = 0
        self._leaves_metrics = leaves_metrics

    def fit_begin(self, params: Mapping[str, Any]) -> None:
        run: Any = self._mlflow.active_run()
        # The run as the store has it: the object here is as old as the run.
        if run is None or _LOGGED in self._client.get_run(run.info.run_id).data.tags:
            run = self._mlflow.start_run(nested=run is not None)
            self._is_own = True
        self._run_id = run.info.run_id
        self._client.set_tag(self._run_id, _LOGGED, "begun")
        if self._events:
            self._client.set_tag(self._run_id, EVENTS_TAG, self._events)
        # Params may not be logged twice, and MLflow's own logging of estimators has been here before.
        known = self._client.get_run(self._run_id).data.params
        texts = {name: str(value)[:_PARAM_CHARACTERS] for name, value in params.items() if name not in known}
        self._mlflow.log_params(texts)

    def epoch_end(self, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        self._epoch = epoch
        own = {} if self._leaves_metrics else metrics
        values, now = {**own, "epoch_seconds": seconds}, int(time.time() * 1000)
        logged = [self._mlflow.entities.Metric(name, value, now, epoch) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=logged)

    def fit_end(self, fitted: Any, error: BaseException | None) -> None:
        if not self._run_id:
            # It has found or opened none.
            return
        outcome = "failed" if error is not None else "finished"
        try:
            if fitted is not None and _autolog_setting("log_models", True):
                self._log_model(fitted)
        except Exception as problem:
            outcome = "finished, without its model"
            raise RuntimeError(
                f"run {self._run_id} of MLflow has the params and metrics of the fit, and no model, which MLflow has "
                f"not taken: {type(problem).__name__}: {problem}. The fit's result is whole: log it yourself, such as "
                "with mlflow.keras.log_model(fitted.model, name='model')."
            ) from problem
        finally:
            try:
                self._client.set_tag(self._run_id, _LOGGED, outcome)
            finally:
                if self._is_own:
                    self._end_run("FAILED" if error is not None else "FINISHED")

    def _end_run(self, status: str) -> None:
        """Ends the run that this listener has opened; one that a callback has left open in it is not this one's."""
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self._run_id:
            self._mlflow.end_run(status)
        else:
            self._client.set_terminated(self._run_id, status)

    def _log_model(self, fitted: Any) -> None:
        import mlflow.keras
        import numpy as np
        from mlflow.models import infer_signature

        model, signature = fitted.model, None
        # Models without inputs of their own, or with strings, have no example.
        with contextlib.suppress(Exception):
            rows = {
                given.name: np.zeros((1, *(size or 1 for size in given.shape[1:])), given.dtype)
                for given in model.inputs
            }
            row = rows if len(rows) > 1 else next(iter(rows.values()))
            signature = infer_signature(row, model.predict_on_batch(row))
        # By its name: this package, which ranks without Keras import too, does not depend on it.
        keras = importlib.import_module("keras")
        needed = ("keras", keras.config.backend(), "numpy")
        versions = {name: Version(importlib.import_module(name).__version__).public for name in needed}
        # MLflow would find them out in a process that imports all of it.
        requirements = [f"{name}=={version}" for name, version in versions.items()]
        # The model's own metrics are those of its step.
        about = {"signature": signature, "pip_requirements": requirements, "step": self._epoch}
        about["registered_model_name"] = _autolog_setting("registered_model_name", None)
        logged = mlflow.keras.log_model(model, name="model", **about)
        own = {type(layer) for layer in flat_layers(model)}
        if ours := sorted(kind.__name__ for kind in own if kind.__module__.startswith("elephant.")):
            warnings.warn(
                f"MLflow's model has layers of elephant: {', '.join(ours)}. Whoever loads it needs elephant, which is "
                f"not among its requirements, and names the layer first: import elephant; elephant.{ours[0]}.",
                stacklevel=2,
            )
        if names := _unregistered(fitted):
            given = ", ".join(f"'{name}': {name}" for name in names)
            warnings.warn(
                f"MLflow's model has classes or functions that Keras does not find by itself: {', '.join(names)}. "
                f"mlflow.keras.load_model({logged.model_uri!r}, custom_objects={{{given}}}) loads it. For "
                "mlflow.pyfunc, which takes no such argument, decorate them with "
                "@keras.saving.register_keras_serializable(), and import them where the model is loaded.",
                stacklevel=2,
            )


def _unregistered(fitted: Any) -> list[str]:
    """Returns the names of the user's classes and functions in a fitted model that are not registered with Keras."""
    keras = importlib.import_module("keras")
    # Besides the losses and metrics that the model holds; a lambda has no name.
    named = [value for name, value in fitted.source.custom_objects.items() if name.isidentifier()]
    kinds = [type(layer) for layer in flat_layers(fitted.model)]
    own = {one for one in (*named, *kinds) if not one.__module__.startswith(("keras.", "elephant."))}
    return sorted({one.__name__ for one in own if keras.saving.get_registered_name(one) == one.__name__})


def mlflow_listeners(events: str = "", callbacks: Sequence[Any] = ()) -> list[FitListener]:
    """Returns the listener that logs to MLflow, where it is imported and a run is active, or logging is automatic.

    Args:
        events: The file of the fit's events; empty where there is none.
        callbacks: Those of the fit: MLflow's own logs the metrics of every epoch to the same run.
    """
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or (mlflow.active_run() is None and not _autologs()):
        return []
    theirs = (one for one in callbacks if type(one).__module__.partition(".")[0] == "mlflow")
    leaves_metrics = any(getattr(one, "log_every_epoch", False) for one in theirs)
    return [MlflowListener(events, leaves_metrics=leaves_metrics)]


def _autologs() -> bool:
    """Returns whether MLflow is to log fits by itself, and no hook of its own has opened a run for the estimator.

    It has none over Spark Connect, for files and for prepared rows. Fits in threads, such as those of a
    `CrossValidator`, do not each open one.
    """
    from mlflow.utils.autologging_utils import autologging_is_disabled

    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and not all(autologging_is_disabled(flavor) for flavor in _FLAVORS)


def _autolog_setting(name: str, default: Any) -> Any:
    """Returns a setting of MLflow's logging by itself, such as ``log_models=False``; else the default."""
    from mlflow.utils.autologging_utils import autologging_is_disabled, get_autologging_config

    enabled = (flavor for flavor in _FLAVORS if not autologging_is_disabled(flavor))
    told = (get_autologging_config(flavor, name, default) for flavor in enabled)
    return next((value for value in told if value != default), default)
