"""Runs of MLflow for the trials of a search, within that of the calling thread."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elephant.monitor.listeners import mlflow_listeners

_PARENT = "mlflow.parentRunId"


class TrialRun:
    """The run of one trial; nothing where no run is wanted."""

    def __init__(self, mlflow: Any = None) -> None:
        self._mlflow = mlflow

    def end_with(self, metric: str, history: Mapping[str, Sequence[Any]]) -> None:
        """Notes the metric that the trial is compared by."""
        if self._mlflow is not None:
            self._mlflow.log_metric("objective", history[metric][-1])


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
        self._mlflow.start_run(run_name=f"trial-{number}", nested=True, tags={_PARENT: self._parent})
        try:
            self._mlflow.set_tag("trial", number)
            for name, value in params.items():
                self._mlflow.set_tag(f"suggested.{name}", value)
            yield TrialRun(self._mlflow)
        except BaseException:
            self._mlflow.end_run("KILLED")
            raise
        self._mlflow.end_run()
