"""Runs of MLflow for the trials of a search, and for their folds, within that of the calling thread."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
        self._mlflow.log_metric("objective", statistics.fmean(values))
        if len(values) > 1:
            self._mlflow.log_metric("objective_std", statistics.pstdev(values))

    @contextlib.contextmanager
    def of_fold(self, number: int | None) -> Iterator[None]:
        """Opens the run of a fold within that of the trial; it is killed where its fit is pruned or fails.

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
        """Opens the run of a trial in this thread; it is killed where the trial is pruned or fails."""
        if self._mlflow is None:
            yield TrialRun()
            return
        suggested = {f"suggested.{name}": value for name, value in params.items()}
        with _ended_run(self._mlflow, f"trial-{number}", {_PARENT: self._parent, "trial": number, **suggested}):
            yield TrialRun(self._mlflow)


@contextlib.contextmanager
def _ended_run(mlflow: Any, name: str, tags: Mapping[str, Any]) -> Iterator[None]:
    """Opens a run in this thread, within the one that is active there; an error kills it."""
    mlflow.start_run(run_name=name, nested=True, tags={tag: str(value) for tag, value in tags.items()})
    try:
        yield
    except BaseException:
        mlflow.end_run("KILLED")
        raise
    mlflow.end_run()
