"""Runs of MLflow for the fits of a search, of a `CrossValidator` and of lists of params, within that of the caller."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elephant.errors import JobCancelledError, warn_user
from elephant.monitor.listeners import mlflow_listeners

_PARENT = "mlflow.parentRunId"


class TrialRun:
    """The run of one trial; nothing where no run is wanted."""

    def __init__(self, mlflow: Any = None) -> None:
        self._mlflow = mlflow

    def end_with(self, values: Sequence[float]) -> None:
        """Notes the metric that the trial is compared by: the mean over its fits, and of several the deviation."""
        if self._mlflow is None:
            return
        spread = {"objective_std": statistics.pstdev(values)} if len(values) > 1 else {}
        with _warned():
            self._mlflow.log_metrics({"objective": statistics.fmean(values), **spread})

    @contextlib.contextmanager
    def of_fold(self, number: int | None) -> Iterator[None]:
        """Opens the run of a fold within that of the trial; which is killed where its fit is pruned.

        Args:
            number: None without folds, where the trial's run is that of its fit.
        """
        if self._mlflow is None or number is None:
            yield
            return
        with _ended_run(self._mlflow, f"fold-{number}", {"fold": number}):
            yield


class TrialRuns:
    """Runs of MLflow for trials, each in the thread of its trial.

    Args:
        mlflow: The module; None where nobody logs.
        parent: The run that they belong to.
    """

    def __init__(self, mlflow: Any = None, parent: str = "") -> None:
        self._mlflow, self._parent = mlflow, parent

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[TrialRuns]:
        """Gives those of the active run, or of one that is opened where MLflow logs by itself."""
        mlflow = sys.modules.get("mlflow")
        if mlflow is None or not mlflow_listeners():
            yield cls()
            return
        active = mlflow.active_run()
        if active is not None:
            yield cls(mlflow, active.info.run_id)
            return
        with mlflow.start_run(run_name="elephant.search") as run:
            yield cls(mlflow, run.info.run_id)

    @contextlib.contextmanager
    def run_of(self, number: int, params: Mapping[str, Any]) -> Iterator[TrialRun]:
        """Opens the run of a trial in this thread; which is killed where the trial is pruned."""
        if self._mlflow is None:
            yield TrialRun()
            return
        suggested = {f"suggested.{name}": value for name, value in params.items()}
        tags = {_PARENT: self._parent, "trial": number, **suggested}
        with _ended_run(self._mlflow, f"trial-{number}", tags) as is_open:
            yield TrialRun(self._mlflow if is_open else None)


class GridRuns:
    """Runs of MLflow for the fits of a list of param maps, in whatever thread they are.

    They belong to the run that is active in the thread which asks for the fits. Where there is none, neither are they.

    Args:
        fold: Number of the fold in a `CrossValidator`; None outside of one.
    """

    def __init__(self, fold: int | None) -> None:
        mlflow = sys.modules.get("mlflow")
        active = None if mlflow is None else mlflow.active_run()
        self._mlflow, self._parent = mlflow, None if active is None else active.info.run_id
        self._fold = fold

    @contextlib.contextmanager
    def run_of(self, place: int) -> Iterator[None]:
        """Opens the run of the fit with the param map of a place in the list."""
        if self._parent is None:
            yield
            return
        numbers = {"params": place} if self._fold is None else {"fold": self._fold, "params": place}
        name = "-".join(f"{what}-{number}" for what, number in numbers.items())
        with _ended_run(self._mlflow, name, {_PARENT: self._parent, **numbers}):
            yield


@contextlib.contextmanager
def _ended_run(mlflow: Any, name: str, tags: Mapping[str, Any]) -> Iterator[bool]:
    """Opens a run in this thread, within the one that is active there.

    An error makes it one that has failed; it was killed where a trial was pruned, or a user has ended the fit.

    Where MLflow does not answer, the user is warned, and what is fitted goes without a run, as the value says.
    """
    run, status = None, "FINISHED"
    with _warned():
        run = mlflow.start_run(run_name=name, nested=True, tags={tag: str(value) for tag, value in tags.items()})
    try:
        yield run is not None
    except BaseException as error:
        pruned = getattr(sys.modules.get("optuna"), "TrialPruned", JobCancelledError)
        was_ended = not isinstance(error, Exception) or isinstance(error, (pruned, JobCancelledError))
        status = "KILLED" if was_ended else "FAILED"
        raise
    finally:
        if run is not None:
            with _warned():
                mlflow.end_run(status)


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """Makes an error of MLflow a warning: hours of fits are worth more than what is logged of them."""
    try:
        yield
    except Exception as error:
        warn_user(f"MLflow has not taken what is logged of a fit, which goes on: {type(error).__name__}: {error}")
